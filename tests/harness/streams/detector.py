"""Finds races between streams, without a device: tensors of the CPU stand for a device's.

[Note: simulated streams]

Within :func:`detecting`, ``overlap._torch.device`` has simulated streams. All runs on the host, at once and in the
order of the program, so values are right; what the streams *would* be free to reorder is computed beside it. Each ATen
operator reads and writes memory on the current stream of its thread; streams and the host are vector clocks
(:mod:`.clocks`), and each byte remembers who has touched it last (:mod:`.shadow`). Two accesses to a byte, one a write,
of which neither is ordered behind the other, are a race.

Memory that is made while nobody looks, and that operators make, is the device's; what ``torch.tensor(...)``,
``torch.zeros(...)`` and the like make without ``device`` is the host's, as ever: give them the device, or build models
before the detector starts or in ``with torch.device("cpu"):``. When memory is used after it was freed is in
[Note: memory that is lent again] in :mod:`.allocator`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from overlap._torch.device import streams_replaced

from .allocator import Allocator
from .clocks import Access, Host, Moment, Stream, frames_of_interest
from .operators import aten, is_host_synchronization, operands
from .report import Fault, HostSync, Report
from .shadow import Memory

_active: Detector | None = None
_COPIES = {aten.copy_, aten._foreach_copy_}


def active() -> Detector | None:
    """The detector that runs in this process."""
    return _active


@contextlib.contextmanager
def detecting() -> Iterator[Detector]:
    """Simulate streams and watch them; what is found is in the detector's ``report``.

    Register chains and hooks within it: what was registered before runs without streams.

    Example::

        with detecting() as detector:
            train()
        detector.report.check()
    """
    from .modes import FunctionMode, OperatorMode
    from .simulated import SimulatedStreams, futures_of_hooks

    global _active
    assert _active is None, "one detector at a time"
    detector = Detector()
    functions = FunctionMode(detector)
    with contextlib.ExitStack() as stack:
        stack.enter_context(streams_replaced(SimulatedStreams(detector)))
        # Objects cross the device's memory on their way to other ranks.
        stack.enter_context(
            mock.patch.object(distributed_c10d, "_get_object_coll_device", return_value=detector.device)
        )
        stack.enter_context(futures_of_hooks())
        stack.enter_context(functions.in_backward())
        stack.enter_context(functions)
        stack.enter_context(OperatorMode(detector))
        _active = detector
        try:
            yield detector
        finally:
            _active = None


class Detector:
    """The clocks, the shadow memory and the report of one run."""

    def __init__(self) -> None:
        self.report = Report()
        self.host = Host(self.note_host_sync)
        self.device = torch.device("cpu")
        self.default_stream = Stream("the default stream", self.device, self.host)
        self._local = threading.local()
        self._streams = [self.default_stream]
        self._notes_host_syncs = False
        before = Access(self.default_stream, 0, "what was before", ())
        self.allocator = Allocator(before, lambda *both: self.report.faults.append(Fault("use after free", *both)))

    # Streams.

    def new_stream(self, name: str = "") -> Stream:
        stream = Stream(name or f"stream {len(self._streams)}", self.device, self.host)
        self._streams.append(stream)
        return stream

    @property
    def current_stream(self) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.default_stream)
        return stream

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[Stream]:
        before = self.current_stream
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before

    def enter(self, stream: Stream) -> None:
        """From now on ``stream`` is the current one of this thread."""
        self._local.stream = stream

    def all_done(self) -> Moment:
        """The moment at which everything that was queued so far is done."""
        return {stream: stream.now for stream in self._streams}

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Within it the training loop proper runs: where the host waits for the device is noted."""
        self._notes_host_syncs = True
        try:
            yield
        finally:
            self._notes_host_syncs = False

    def note_host_sync(self, what: str) -> None:
        if self._notes_host_syncs:
            self.report.host_syncs.append(HostSync(what, frames_of_interest()))

    # Memory.

    def memory(self, tensor: Tensor) -> Memory:
        """The shadow of the tensor's storage."""
        return self.allocator.memory(tensor)

    def make_host_memory(self, tensor: Tensor, *, is_pinned: bool) -> Tensor:
        """From now on the tensor's storage, which is new, is the host's."""
        born = Access(self.host, self.host.advance(), "allocated", ())
        self.allocator.allocated(tensor.untyped_storage(), born, is_host=True, is_pinned=is_pinned)
        return tensor

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The memory of ``storage`` was given back, or it has got other memory, on the current stream."""
        stream, born = self.current_stream, None
        if storage.nbytes():
            born = Access(stream, stream.advance(), "allocated for a storage that was empty", frames_of_interest())
        self.allocator.resized(storage, born)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.memory(tensor).recorded.add(stream)

    # What is done.

    def access(
        self, timeline: Stream | Host, what: str, *, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()
    ) -> Access:
        """Something on ``timeline`` reads and writes tensors."""
        self.report.operators += 1
        access = Access(timeline, timeline.advance(), what, frames_of_interest())
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                for earlier in self.allocator.touched(tensor, access, is_write=is_write):
                    self.report.faults.append(Fault("race", earlier, access))
        return access

    def called(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator was called; it runs on the current stream, or on the host if all its operands are there."""
        found = operands(operator, args, kwargs, result)
        if found is None:
            return
        # What a number of Python's becomes on its way into a tensor is nobody's memory.
        is_assignment = operator.overloadpacket is aten.copy_
        reads = [one for one in found.reads if one.ndim or not is_assignment or self.allocator.has_seen(one)]
        given = [self.memory(tensor) for tensor in (*reads, *found.writes)]
        on_host = bool(given) and all(memory.is_host for memory in given)
        if not on_host:
            if is_host_synchronization(operator, args):
                self.host.synchronize(str(operator), self.current_stream.present())
            if any(memory.is_host for memory in given):
                self._copied(operator, args, kwargs, given)
        access = self.access(
            self.host if on_host else self.current_stream, str(operator), reads=reads, writes=found.writes
        )
        for tensor in found.made:
            self.allocator.allocated(tensor.untyped_storage(), access, is_host=on_host)

    def _copied(self, operator: Any, args: Any, kwargs: Any, memories: list[Memory]) -> None:
        """An operator with tensors of both the host and the device: a copy."""
        assert operator.overloadpacket in _COPIES, f"{operator}: tensors of the host and of the device"
        is_non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if not is_non_blocking or not all(memory.is_pinned for memory in memories if memory.is_host):
            self.host.synchronize(f"{operator} between host and device", self.current_stream.present())

    def read_by_host(self, tensor: Tensor, what: str) -> None:
        """The host reads values: it waits if they are a device's."""
        if not self.memory(tensor).is_host:
            self.host.synchronize(what, self.current_stream.present())
        self.access(self.host, what, reads=[tensor])
