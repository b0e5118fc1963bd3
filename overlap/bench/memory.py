"""The peak memory of one variant, measured in a process that holds nothing else.

On the CPU that is how far the peak of the process's resident set rises above where it stood before the variant was
built: weights, gradients, buckets, optimizer state, activations and the backend's buffers, as the kernel counts them.
The C library is told to give memory back as soon as it is freed, or the peak would include what it keeps. On CUDA it
is the allocator's own peak.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 64 * 1024


class MemoryMeter:
    """Measures from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError, AttributeError):
            # Fixed, the threshold no longer rises with each large block that is freed.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        # 5 sets the recorded peak back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self._before_bytes = _status_bytes("VmHWM")

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status_bytes("VmHWM") - self._before_bytes


def available_bytes(device: torch.device, processes: int) -> int:
    """What one of `processes` may take without pushing the others out."""
    if device.type == "cuda":
        sharing = -(-processes // torch.cuda.device_count())
        return int(torch.cuda.mem_get_info(device)[0]) // sharing
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // processes
    raise AssertionError("/proc/meminfo has no MemAvailable")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {key}")
