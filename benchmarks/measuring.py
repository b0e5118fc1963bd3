"""What is measured of a process and of its machine: memory, bytes that are sent, and what /proc says."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import statistics
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.link import INTERFACE


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


Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "none"]

# What each method of a process group sends, and which of its arguments is the whole tensor.
_VOLUMES: dict[str, tuple[Kind, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("broadcast", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "gather": ("all_to_all", 1),
    "scatter": ("all_to_all", 0),
    "send": ("send", 0),
    "recv": ("none", 0),
    "recv_any_source": ("none", 0),
    "barrier": ("none", 0),
    "monitored_barrier": ("none", 0),
    "check_for_nan": ("none", 0),
}

_sent_bytes_total = 0.0


def sent_bytes(kind: Kind, payload_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends, by the bandwidth-optimal ring algorithms; a broadcast's mean over the ranks.

    `payload_bytes` is the whole tensor: what an all-gather leaves on a rank, what a reduce-scatter takes from one.

    >>> sent_bytes("all_reduce", 1000, 2), sent_bytes("reduce_scatter", 1000, 4)
    (1000.0, 750.0)
    """
    if kind == "none":
        return 0.0
    if kind == "send":
        return float(payload_bytes)
    passes = 2 if kind == "all_reduce" else 1
    return passes * payload_bytes * (ranks - 1) / ranks


def counted_bytes() -> float:
    """Bytes sent so far by this process in collectives that were counted."""
    return _sent_bytes_total


def count(name: str, arguments: Sequence[Any], ranks: int) -> float:
    """Add what a collective sends to the total, and return it.

    Args:
        name: the method of `ProcessGroup`, or the operator in `torch.ops.c10d`, which has an underscore behind it.
        arguments: the method's own, tensors first.
        ranks: how many take part.
    """
    global _sent_bytes_total
    kind, payload = _VOLUMES[name if name in _VOLUMES else name.removesuffix("_")]
    added = 0.0 if kind == "none" else sent_bytes(kind, nbytes(arguments[payload]), ranks)
    _sent_bytes_total += added
    return added


@contextmanager
def counting() -> Iterator[None]:
    """Within it, collectives on PyTorch's own process groups are counted, as they are issued."""
    with IssuedCollectives(count):
        yield


def nbytes(tensors: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    return sum(tensor.nbytes for tensor in flatten(tensors))


def flatten(tensors: Any) -> list[Tensor]:
    """The tensors in nested lists of them; what is neither is left out."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple):
        return []
    return [tensor for entry in tensors for tensor in flatten(entry)]


# Offsets in Linux's `struct tcp_info`, whose layout is part of the kernel's stable interface.
_BYTES_SENT_OFFSET = 200
_BYTES_RETRANSMITTED_OFFSET = 208


def sent_bytes_counter(link: str) -> Callable[[], float]:
    """The counter that fits a link: its interface, the process's sockets, or the collectives."""
    if link == "namespaces":
        return _interface_bytes
    return socket_bytes if link == "loopback" else counted_bytes


def _interface_bytes() -> float:
    """What left the namespace's one interface; all of it is this rank's, headers included.

    Without what was sent twice: that says how busy the machine was, and not what a variant sends.
    """
    left = int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())
    return float(left - sum(again for _, again in _of_all_sockets()))


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


# Private: the public counter of communication, `CommDebugMode`, counts calls and not bytes, and no messages.


class IssuedCollectives(TorchDispatchMode):
    """Within it, ``note(name, arguments, size)`` is called for each collective on a process group of PyTorch's.

    ``name`` is that of the operator in ``torch.ops.c10d``, ``arguments`` are its own, tensors first, and ``size`` is
    the number of ranks. Collectives of this thread and of backward are seen, DDP's included; those of other threads,
    and of groups written in Python, are not. Nothing else changes: collectives reach the process group that they were
    meant for, and messages that PyTorch starts together stay together.
    """

    def __init__(self, note: Callable[[str, Sequence[Any], int], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args, _ranks(args))
        return func(*args, **(kwargs or {}))


def _ranks(arguments: Sequence[Any]) -> int:
    """Operators get their process group in a box, after their tensors."""
    for argument in arguments:
        if type(argument).__name__ == "ScriptObject" and argument._type().qualified_name().endswith("ProcessGroup"):
            return int(dist.ProcessGroup.unbox(argument).size())
    return 1


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 25th, 50th and 75th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    lower, middle, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return lower, middle, upper


def describe_machine() -> dict[str, Any]:
    """What a reader needs to know to place absolute times."""
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
