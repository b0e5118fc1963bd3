"""A link that only exists in arithmetic: one process stands for all ranks, and collectives take the time they would.

Each collective takes `bytes / bandwidth + latency`, one after the other as on a real link, while the computation goes
on. Every simulated rank has this process's data, so sums are multiplied and gathers repeat it. Messages that this
process sends are not received by anybody, and those that it receives are zeros.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from benchmarks.measuring import count, flatten
from overlap._torch.device import current_stream, future_for, has_streams, hold, new_stream, on_stream

SIMULATED_BACKEND = "overlap-simulated"
# Any: C++ calls a subclass with signatures that are not among the declared overloads of ProcessGroup's methods.
CustomGroup: Any = dist.ProcessGroup
# A callback may wait for another transfer: there must be a thread for that one's callbacks, too.
_CALLBACK_THREADS = 64


@dataclass
class SimulatedLink:
    """How fast the link between simulated ranks is; a change holds from the next collective on."""

    bandwidth_bytes_per_s: float
    # Of each collective, or of all messages that are started together.
    latency_s: float = 0.0


def register_simulated_backend(link: SimulatedLink) -> None:
    """Makes `init_process_group(SIMULATED_BACKEND, rank=0)` join ranks, all of them this process, by `link`."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(size, link)

    dist.Backend.register_backend(SIMULATED_BACKEND, create, devices=["cpu", "cuda"])


class FutureWork(Work):
    """The ``Work`` of a collective that is done when ``future`` is; the future's value is the list of tensors.

    PyTorch's own wrapper of a future, ``_create_work_from_future``, cannot be waited for with a timeout.
    """

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks the thread or, on CUDA, makes the current stream wait. ``timeout`` is ignored: a future has none."""
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done()

    def result(self) -> list[Tensor]:
        tensors: list[Tensor] = self._future.value()
        return tensors


class SimulatedGroup(CustomGroup):  # type: ignore[misc]
    """A process group of `size` ranks in one process; see the module's docstring.

    The methods are those that `ProcessGroup` dispatches to from C++ (DDP's reducer) and from `torch.distributed`, as
    far as the variants need them. Operations between `_start_coalescing` and `_end_coalescing` share one latency and
    one `Work`.
    """

    def __init__(self, size: int, link: SimulatedLink) -> None:
        super().__init__(0, size)
        self._size = size
        self._link = link
        self._coalesced: list[_Transfer] | None = None

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks up
        return "fake"  # No other processes are behind it.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allreduce", partial(self._reduce, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._perform("broadcast", _nothing, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allgather", _fill_each, outputs, inputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._perform("_allgather_base", self._repeat, [output], [input])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._perform("_reduce_scatter_base", partial(self._reduce_chunk, opts), [output], [input])

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        return self._perform("send", _nothing, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._perform("recv", _clear, tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._perform("barrier", _nothing, [])

    # PyTorch 2.13 renamed these; both names are dispatched to.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        transfers, self._coalesced = self._coalesced or [], None
        return self._put(transfers)

    def _perform(self, name: str, act: Callable[..., None], results: Sequence[Any], *others: Sequence[Any]) -> Any:
        """Counts and sends the bytes of a collective; then `act` changes its tensors as if every rank had the same.

        `results` are the value of its `Work`.
        """
        transfer = _Transfer(
            duration_s=count(name, (results, *others), self._size) / self._link.bandwidth_bytes_per_s,
            # A message takes its time on the link of the peer that sends it.
            latency_s=0.0 if name == "recv" else self._link.latency_s,
            act=partial(act, results, *others),
            results=list(results),
            tensors=flatten([results, *others]),
        )
        if self._coalesced is None:
            return self._put([transfer])
        self._coalesced.append(transfer)
        return None

    def _put(self, transfers: Sequence[_Transfer]) -> FutureWork:
        duration_s = sum(one.duration_s for one in transfers) + max((one.latency_s for one in transfers), default=0.0)
        tensors = [tensor for one in transfers for tensor in one.tensors]
        results = [result for one in transfers for result in one.results]

        @torch.no_grad()
        def act() -> None:
            for one in transfers:
                one.act()

        return FutureWork(_queue_for(tensors).put(duration_s, act, tensors, results))

    def _reduce(self, opts: Any, tensors: list[Tensor]) -> None:
        operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        # Not `in`: an operation of a call's options is equal to a name only when it stands on the left.
        if operation == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
        elif not any(operation == one for one in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            raise NotImplementedError("a simulated link cannot reduce so: it knows SUM, AVG, MIN and MAX")

    def _reduce_chunk(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.view(-1).copy_(tensor.reshape(self._size, -1)[0])
        self._reduce(opts, outputs)

    def _repeat(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.view(self._size, -1).copy_(tensor.reshape(1, -1).expand(self._size, -1))


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    duration_s: float
    latency_s: float
    act: Callable[[], None]
    results: list[Any]
    tensors: list[Tensor]


def _nothing(*_: Any) -> None:
    """The ranks have equal data: there is nothing to change."""


def _clear(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _fill_each(outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
    for copies, tensor in zip(outputs, inputs, strict=True):
        for copy in copies:
            copy.copy_(tensor)


def _queue_for(tensors: Sequence[Tensor]) -> _ThreadQueue | _StreamQueue:
    """The one of the tensors' device. All groups of a process share it, as they share a network card."""
    device = tensors[0].device if tensors else torch.device("cpu")
    return _stream_queue(device) if has_streams(device) else _thread_queue()


class _ThreadQueue:
    """Makes one transfer after the other on a thread: each keeps the link busy for a time and then calls `act`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[float, float, Callable[[], None], Future[Any], Any]] = queue.SimpleQueue()
        self._callbacks = ThreadPoolExecutor(_CALLBACK_THREADS, thread_name_prefix="simulated-link-callbacks")
        threading.Thread(target=self._run, name="simulated-link", daemon=True).start()

    def put(self, duration_s: float, act: Callable[[], None], tensors: Sequence[Tensor], result: Any) -> Future[Any]:
        """Queues a transfer of `tensors`; the future is done with `result` when the transfer is."""
        future: Future[Any] = Future()
        self._jobs.put((time.monotonic(), duration_s, act, future, result))
        return future

    def _run(self) -> None:
        free_at_s = 0.0
        while True:
            issued_at_s, duration_s, act, future, result = self._jobs.get()
            # Against the clock, not by adding sleeps: a late wake-up must not slow the link down.
            free_at_s = max(free_at_s, issued_at_s) + duration_s
            time.sleep(max(0.0, free_at_s - time.monotonic()))
            try:
                act()
            except Exception as error:
                self._callbacks.submit(future.set_exception, error)
            else:
                self._callbacks.submit(future.set_result, result)


class _StreamQueue:
    """The same on a side stream of a GPU, which is kept busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._cycles_per_s = _spin_cycles_per_s(device)

    def put(self, duration_s: float, act: Callable[[], None], tensors: Sequence[Tensor], result: Any) -> Future[Any]:
        """Launches a transfer of `tensors`; the future is done with `result` when the transfer is."""
        future = future_for(self._device)
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            spin(int(duration_s * self._cycles_per_s))
            act()
            for tensor in tensors:
                hold(tensor)
            # Completed on the side stream: whoever waits makes its own stream wait for this point.
            future.set_result(result)
        return future


def spin(cycles: int) -> None:
    """Keeps the current CUDA stream busy for a number of clock cycles. Private: PyTorch has it for its tests."""
    torch.cuda._sleep(cycles)


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


_thread_queue = cache(_ThreadQueue)
_stream_queue = cache(_StreamQueue)
