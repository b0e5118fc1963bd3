"""A link that only exists in arithmetic: one process stands for all ranks, and collectives take the time they would.

Each collective waits on a side channel for `bytes / bandwidth + latency`, one after the other as on a real link, while
the computation goes on: on CUDA the channel is a stream that spins, on the CPU a thread that sleeps. Every simulated
rank has this process's data, so sums are multiplied and gathers repeat it. Its numbers are called simulated.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from overlap._torch.custom_group import FutureWork, spin
from overlap.bench.collectives import CountingGroup, Kind, sent_bytes

SIMULATED_BACKEND = "overlap-simulated"


class SimulatedGroup(CountingGroup):
    """A process group of `size` ranks in one process; see the module's docstring."""

    def __init__(self, size: int, *, bandwidth_bytes_per_s: float, latency_s: float) -> None:
        super().__init__(0, size)
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._latency_s = latency_s

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks up
        return SIMULATED_BACKEND

    def perform(self, name: str, kind: Kind, payload_bytes: int, *args: Any) -> Any:
        duration_s = sent_bytes(kind, payload_bytes, self._size) / self._bandwidth_bytes_per_s + self._latency_s
        result = args[0] if isinstance(args[0], list) else [args[0]] if isinstance(args[0], Tensor) else []
        device = next((tensor.device for tensor in _flatten(result)), torch.device("cpu"))
        channel = _cuda_channel(device) if device.type == "cuda" else _cpu_channel()
        return FutureWork(channel.put(duration_s, partial(self._act, name, *args), result))

    def _act(self, name: str, *args: Any) -> None:
        """What the collective does to its tensors, given that every rank holds the same."""
        if name in ("allreduce", "allreduce_coalesced"):
            for tensor in args[0]:
                self._reduce(tensor, args[-1])
        elif name == "allgather":
            for outputs, tensor in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(tensor)
        elif name == "_allgather_base":
            args[0].view(self._size, -1).copy_(args[1].reshape(1, -1).expand(self._size, -1))
        elif name == "_reduce_scatter_base":
            args[0].view(-1).copy_(args[1].reshape(self._size, -1)[0])
            self._reduce(args[0], args[-1])
        elif name == "reduce_scatter":
            for output, parts in zip(args[0], args[1], strict=True):
                output.copy_(parts[0])
                self._reduce(output, args[-1])
        elif name not in ("broadcast", "barrier"):
            raise NotImplementedError(f"a simulated link has no {name}: it stands for ranks with equal data")

    def _reduce(self, tensor: Tensor, opts: Any) -> None:
        operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if operation == dist.ReduceOp.SUM:
            tensor.mul_(self._size)
            return
        # Not `in`: an operation of a call's options is equal to a name only when it stands on the left.
        if not any(operation == one for one in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            raise NotImplementedError("a simulated link cannot reduce so: it knows SUM, AVG, MIN and MAX")


class _CpuChannel:
    """A thread that sleeps through one transfer after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[float, float, Any, Future[Any], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="simulated-link", daemon=True).start()

    def put(self, duration_s: float, effect: Any, result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((time.monotonic(), duration_s, effect, future, result))
        return future

    def _run(self) -> None:
        free_at = 0.0
        while True:
            issued_at, duration_s, effect, future, result = self._jobs.get()
            # Against the clock, not by adding sleeps: a late wake-up must not slow the link down.
            free_at = max(free_at, issued_at) + duration_s
            time.sleep(max(0.0, free_at - time.monotonic()))
            try:
                effect()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)


class _CudaChannel:
    """A stream that spins through one transfer after the other; the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._cycles_per_s = _spin_cycles_per_s(device)

    def put(self, duration_s: float, effect: Any, result: Any) -> Future[Any]:
        future: Future[Any] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            spin(int(duration_s * self._cycles_per_s))
            effect()
            for tensor in _flatten(result):
                # The caching allocator must not hand this memory out again before the side stream is done.
                tensor.record_stream(self._stream)
            # Completed on the side stream: whoever waits makes its own stream wait for this point.
            future.set_result(result)
        return future


def _spin_cycles_per_s(device: torch.device) -> float:
    """How fast this device counts the cycles that `spin` is given in."""
    cycles = 50_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        spin(cycles)  # the clock rises under load
        start.record()
        spin(cycles)
        end.record()
        end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return 1000 * cycles / elapsed_ms


# All groups of a process share its one link, as they share a network card.
_cpu_channel = cache(_CpuChannel)
_cuda_channel = cache(_CudaChannel)


def _flatten(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for entry in tensors for tensor in _flatten(entry)]


def register_simulated_backend(*, bandwidth_bytes_per_s: float, latency_s: float) -> None:
    """Make `init_process_group(SIMULATED_BACKEND, rank=0)` join ranks, all of them this process, by such a link."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(size, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)

    dist.Backend.register_backend(SIMULATED_BACKEND, create, devices=["cpu", "cuda"])
