"""Simulated communicators over Gloo, for CPU tensors that stand for a device's.

What a device does is done at once here, and what it would wait for the host waits for, as a training loop that reads
its loss does. As with NCCL, a collective of which a peer has gone never ends by itself: only ``abort()`` ends it, and
then it looks as if it were done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._threads import start
from overlap._torch.c10d import PrefixStore, Store, group_timeout
from overlap._torch.communicators import Communicators, communicators_replaced
from overlap._torch.device import DeviceStreams, streams_replaced

__all__ = ["HostStreams", "SimulatedCommunicators", "SimulatedGroup", "on_simulated_device"]

_LOOKING_S = 0.001
_issuing = ThreadPoolExecutor(1, "issue")


def _issued(start: Callable[[], Any]) -> Any:
    """The work that Gloo makes, without what belongs to a backward.

    Every work keeps what is local to the thread that issued it, and in a backward PyTorch puts a Python object there.
    Gloo's thread drops it when it is done with the work. If the script has ended by then, that aborts the process.
    """
    return _issuing.submit(start).result()


class _Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass


class _Event:
    def record(self, stream: _Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True


class HostStreams(DeviceStreams):
    """Streams that exist in name only."""

    def __init__(self) -> None:
        self._current = _Stream(torch.device("cpu"))

    def has_streams(self, device: torch.device) -> bool:
        return True

    def new_stream(self, device: torch.device, **options: Any) -> Any:
        return _Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        return self._current

    def default_stream(self, device: torch.device) -> Any:
        return self._current

    def is_capturing(self, device: torch.device | None) -> bool:
        return False

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_event(self, device: torch.device, *, is_timed: bool) -> Any:
        return _Event()

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        pass

    def future_for(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.clone()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self, device: torch.device) -> None:
        pass


class _Work:
    """Done when the works of Gloo are, or when its group was aborted."""

    def __init__(
        self, group: SimulatedGroup, works: Sequence[Any], what: str, then: Callable[[], Any] = lambda: None
    ) -> None:
        self._group = group
        self._works = works
        self._what = what
        self._then = then

    def wait(self) -> bool:
        while not self._group.is_aborted and not all(map(_is_done, self._works)):
            time.sleep(_LOOKING_S)
        self._then()
        self._group.log.append(f"waited for {self._what}")
        return True


def _is_done(work: Any) -> bool:
    """Whether it ended well; a kernel whose peer has gone does not end."""
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


class _Message:
    """A message of Gloo's says at once that it is done, so a thread waits for it."""

    def __init__(self, work: Any) -> None:
        self._is_over = threading.Event()
        self._error: RuntimeError | None = None
        self._work = work
        start(self._run, "message")  # Waited for when the script ends: see [Note: the end of the interpreter].

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._is_over.set()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class SimulatedGroup(dist.ProcessGroup):
    """As NCCL's: works make the stream wait, ``abort()`` ends them, and no other call works afterwards."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, log: list[str]) -> None:
        super().__init__(rank, size)
        # Its destructor may wait for what was aborted, at most as long as the timeout.
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.log = log
        self.is_aborted = False
        self._batch: list[Any] | None = None

    def _start(self, what: str, start: Callable[[], Any], then: Callable[[], Any] = lambda: None) -> Any:
        if self.is_aborted:
            raise RuntimeError("communicator was aborted")
        self.log.append(what)
        return _Work(self, [_issued(start)], what, then)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return self._start("allreduce", lambda: self._gloo.allreduce(tensors, options))

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any) -> Any:
        return self._start("allgather", lambda: self._gloo._allgather_base(output, input))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any) -> Any:
        whole = input.clone()  # Gloo's own does nothing until the host waits for it.
        return self._start(
            "reduce_scatter",
            lambda: self._gloo.allreduce([whole]),
            lambda: output.copy_(whole.view(self.size(), -1)[self.rank()].view_as(output)),
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self._start("broadcast", lambda: self._gloo.broadcast(tensors, options))

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None, "two ranks that send before they receive would wait for each other"
        self._batch.append(_issued(lambda: self._gloo.send(tensors, peer, tag)))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None, "two ranks that send before they receive would wait for each other"
        self._batch.append(_issued(lambda: self._gloo.recv(tensors, peer, tag)))

    def _end_coalescing(self, device: torch.device) -> Any:
        batch, self._batch = self._batch or [], None
        self.log.append("messages")
        return _Work(self, [_Message(work) for work in batch], "messages")

    def wait_for_abort(self, *arguments: Any) -> Any:
        """A launch that needs a rank that does not come."""
        while not self.is_aborted:
            time.sleep(_LOOKING_S)
        raise RuntimeError("communicator was aborted")

    def abort(self) -> None:
        self.log.append("abort")
        self.is_aborted = True
        with contextlib.suppress(RuntimeError):
            self._gloo.abort()

    def shutdown(self) -> None:
        self.log.append("shutdown")


@dataclass
class SimulatedCommunicators(Communicators):
    """Makes :class:`SimulatedGroup`; ``log`` has what happened to them."""

    log: list[str] = field(default_factory=list)
    made: list[SimulatedGroup] = field(default_factory=list)
    failure: str | None = None
    """What :meth:`check` raises."""

    def can_make(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return True

    def make(self, group: dist.ProcessGroup, store: Store, device: torch.device) -> Any:
        self.log.append("make")
        timeout = group_timeout(group, device)
        made = SimulatedGroup(PrefixStore("gloo", store), group.rank(), group.size(), timeout, self.log)
        self.made.append(made)
        return made

    def wait(self, work: Any) -> None:
        work.wait()

    def check(self, made: Any) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)


@contextlib.contextmanager
def on_simulated_device(streams: DeviceStreams | None = None) -> Iterator[SimulatedCommunicators]:
    """Within it, CPU tensors count as a device's, and stages have simulated communicators of their own."""
    communicators = SimulatedCommunicators()
    with streams_replaced(streams or HostStreams()), communicators_replaced(communicators):
        yield communicators
