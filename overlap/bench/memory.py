"""The peak memory of one variant, measured in a process that holds nothing else.

On the CPU that is how far the peak of the process's resident set rises above where it stood before the variant was
built: weights, gradients, buckets, optimizer state, activations and the backend's buffers, as the kernel counts them.
The C library is told to give memory back as soon as it is freed, or the peak would include what it keeps. On CUDA it
is the allocator's own peak of what was in use, including blocks that were freed while another stream might still use
them (`record_stream`): they are of no use to others until that stream is done.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

from overlap.bench.proc import proc_bytes

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
        self._before_bytes = proc_bytes("/proc/self/status", "VmHWM")

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_stats(self._device)["active_bytes.all.peak"])
        return proc_bytes("/proc/self/status", "VmHWM") - self._before_bytes


def available_bytes(device: torch.device, processes: int) -> int:
    """What one of `processes` may take without pushing the others out."""
    if device.type == "cuda":
        sharing = -(-processes // torch.cuda.device_count())
        return int(torch.cuda.mem_get_info(device)[0]) // sharing
    return proc_bytes("/proc/meminfo", "MemAvailable") // processes
