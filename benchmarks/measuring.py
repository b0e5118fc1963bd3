"""Measurements of a process and of its machine: memory, bytes that are sent, and the entries of /proc."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import statistics
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from overlap._link import INTERFACE


def proc_value(path: str, key: str) -> str | None:
    """The value of the first line `key: value`; None where there is none, or no `/proc`."""
    with suppress(OSError):
        if match := re.search(rf"^{key}[ \t]*:[ \t]*(.*)$", Path(path).read_text(), re.MULTILINE):
            return match[1]
    return None


def proc_bytes(path: str, key: str) -> int:
    """A size that the kernel gives in kB; 0 where it gives none."""
    return int((proc_value(path, key) or "0").split()[0]) * 1024


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
        # 5 sets the recorded peak back to the present size.
        Path("/proc/self/clear_refs").write_text("5")
        self._before_bytes = proc_bytes("/proc/self/status", "VmHWM")

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_stats(self._device)["active_bytes.all.peak"])
        return proc_bytes("/proc/self/status", "VmHWM") - self._before_bytes


def available_bytes(device: torch.device, processes: int) -> int:
    """How much each of `processes` may take."""
    if device.type == "cuda":
        sharing = -(-processes // torch.cuda.device_count())
        return int(torch.cuda.mem_get_info(device)[0]) // sharing
    return proc_bytes("/proc/meminfo", "MemAvailable") // processes


# By the method of a process group: how often a rank passes the whole tensor on (less its own share), and the argument
# that is the whole tensor; a message is sent once as it is.
_VOLUMES = {
    "allreduce": (2, 0),
    "allreduce_coalesced": (2, 0),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "allgather": (1, 0),
    "_allgather_base": (1, 0),
    "allgather_into_tensor_coalesced": (1, 0),
    "reduce_scatter": (1, 1),
    "_reduce_scatter_base": (1, 1),
    "reduce_scatter_tensor_coalesced": (1, 1),
    "alltoall": (1, 1),
    "alltoall_base": (1, 1),
}
_SEND_NOTHING = ("recv", "recv_any_source", "barrier", "monitored_barrier", "check_for_nan")

_counted_bytes = 0.0


def counted_bytes() -> float:
    """Bytes sent so far by this process in collectives that were counted."""
    return _counted_bytes


def count(name: str, arguments: Sequence[Any], ranks: int) -> float:
    """Adds the bytes that a rank sends in a collective to the total, and returns them.

    They are those of the bandwidth-optimal ring algorithms; of a broadcast, the mean over the ranks.

    Args:
        name: the method of `ProcessGroup`, or the operator in `torch.ops.c10d`, which has an underscore behind it.
        arguments: the method's own, tensors first.
        ranks: how many take part.
    """
    global _counted_bytes
    name = name if name in _VOLUMES else name.removesuffix("_")
    if name in _SEND_NOTHING:
        return 0.0
    if name == "send":
        sent_bytes = float(nbytes(arguments[0]))
    else:
        passes, payload = _VOLUMES[name]
        sent_bytes = passes * nbytes(arguments[payload]) * (ranks - 1) / ranks
    _counted_bytes += sent_bytes
    return sent_bytes


class Counting(TorchDispatchMode):
    """Within it, collectives on PyTorch's own process groups are counted, as they are issued.

    Those of this thread and of backward are seen, DDP's included; those of other threads, and of groups written in
    Python, are not. PyTorch's `CommDebugMode` counts calls and not bytes, and no messages.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            count(func._schema.name.removeprefix("c10d::"), args, _ranks(args))
        return func(*args, **(kwargs or {}))


def _ranks(arguments: Sequence[Any]) -> int:
    """Operators get their process group in a box, after their tensors."""
    for argument in arguments:
        if type(argument).__name__ == "ScriptObject" and argument._type().qualified_name().endswith("ProcessGroup"):
            return int(dist.ProcessGroup.unbox(argument).size())
    return 1


def nbytes(tensors: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    return sum(tensor.nbytes for tensor in flatten(tensors))


def flatten(tensors: Any) -> list[Tensor]:
    """The tensors in nested lists; other values are left out."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple):
        return []
    return [tensor for entry in tensors for tensor in flatten(entry)]


# Offsets in Linux's `struct tcp_info`, whose layout is part of the kernel's stable interface.
_BYTES_SENT_OFFSET = 200
_BYTES_RETRANSMITTED_OFFSET = 208
# In a line of /proc/net/dev, behind the interface's name.
_SENT_COLUMN = 8


def sent_bytes_counter(link: str) -> Callable[[], float]:
    """The counter that fits a link: its interface, the process's sockets, or the collectives."""
    if link == "namespaces":
        return _interface_bytes
    return socket_bytes if link == "loopback" else counted_bytes


def _interface_bytes() -> float:
    """Bytes that left the namespace's one interface; all are this rank's, headers included.

    Without retransmissions: they depend on how busy the machine is, and not on the variant.
    """
    counters = (proc_value("/proc/self/net/dev", f" *{INTERFACE}") or "").split()
    return float(int(counters[_SENT_COLUMN]) - sum(again for _, again in _of_all_sockets()))


def socket_bytes() -> float:
    """Payload sent on every TCP socket that this process has open; loopback's own counter mixes all ranks."""
    return float(sum(sent - again for sent, again in _of_all_sockets()))


def _of_all_sockets() -> list[tuple[int, int]]:
    """Of every TCP socket that this process has open: the bytes sent, and those of them that were sent again."""
    return [_sent_on(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()]


def _sent_on(descriptor: int) -> tuple[int, int]:
    try:
        if not Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("socket:"):
            return 0, 0
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.type != socket.SOCK_STREAM or duplicate.family == socket.AF_UNIX:
                return 0, 0
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        # Closed since it was listed, or not TCP.
        return 0, 0
    if len(info) < _BYTES_RETRANSMITTED_OFFSET + 8:
        return 0, 0
    (sent,) = struct.unpack_from("Q", info, _BYTES_SENT_OFFSET)
    (again,) = struct.unpack_from("Q", info, _BYTES_RETRANSMITTED_OFFSET)
    return int(sent), int(again)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 25th, 50th and 75th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    lower, middle, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return lower, middle, upper


def describe_machine() -> dict[str, Any]:
    """The facts that absolute times depend on."""
    machine: dict[str, Any] = {
        "cpu": proc_value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": proc_bytes("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # Before the run: other work on the machine shows up in the times.
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        machine["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return machine
