"""Gloo backends that nobody else uses."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._threads import start
from overlap._torch.c10d import Row, Store, backend_name

__all__ = ["GlooChannel", "abandon_group", "has_lost_connection"]

_LOOKING_S = 0.002
_IDLE_S = 0.05
# How long an abort waits for what is in flight.
_SETTLING_S = 5.0
# The last tag of messages that no rank sends.
_NEVER_SENT = 2**31 - 1

# Backends whose operations did not end when they were aborted: Gloo's destructor would wait for these, with the
# interpreter's lock.
_kept: list[Any] = []

# In errors of Gloo's, some of which have no place in its sources.
_SIGNS = ("/gloo/", "Application timeout caused pair closure", "Operation timed out!")


def has_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` is Gloo's, since another rank's process has ended, say, or does not come."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _close_connections(backend: Any) -> None:
    """Close the connections of a Gloo ``backend``: whatever waits on them raises, here and on the other ranks.

    Its ``abort()`` leaves them open, so ranks that wait for each other go on waiting until the timeout. A receive that
    times out closes all that are still open; one from a rank whose connection is closed already raises at once. Gloo
    has connections of their own on each network interface, and takes those that the tag says, in turn.
    """
    interfaces = len(getattr(backend.options, "_devices", [None]))
    for tag in range(_NEVER_SENT, _NEVER_SENT - interfaces, -1):
        for rank in range(backend.size()):
            if rank != backend.rank():
                with contextlib.suppress(RuntimeError):
                    backend.recv([torch.empty(1, device="cpu")], rank, tag).wait(timedelta(milliseconds=1))


def abandon_group(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, so that other ranks that wait on them raise; it is of no use afterwards.

    Those of other backends are aborted on this rank; there the other ranks wait for their timeout.
    """
    backend: Any = (
        group._get_backend(torch.device("cpu")) if backend_name(group, torch.device("cpu")) == "gloo" else None
    )
    if backend is None:
        group.abort()
    else:
        _close_connections(backend)


_is_completed: Callable[[dist.Work | _Messages], bool] = operator.methodcaller("is_completed")


class _Messages:
    """The works of messages between two ranks on Gloo, as one that can be waited for with a timeout.

    A wait of their own with a timeout would close the connection when it times out, and they always say that they are
    completed. So ``waiter`` waits for them without one, and whoever waits here can look meanwhile whether another rank
    has failed, which will send nothing.
    """

    def __init__(self, works: Sequence[dist.Work], waiter: _Waiter) -> None:
        self._works = works
        self._waiter = waiter
        self._is_submitted = False
        self._is_over = threading.Event()
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_submitted:
            self._is_submitted = True
            self._waiter.submit(self)
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("no message has come yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def finish(self) -> None:
        """Wait for them, however long that takes."""
        try:
            self._receive()
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error.with_traceback(None)  # Whose frames keep gradients and the backend.
        self._is_over.set()

    def _receive(self) -> None:
        """Receive what has no memory of its own to go to; here nothing."""


class _Sum(_Messages):
    """Messages that are added to this rank's tensors as they come in.

    [Note: rows of a sum]

    What other ranks send needs memory until it is added. Gloo sends a message when its receiver is ready for it, so
    this rank posts all its sends at once, and receives a row at a time: the part of a message from each of the others
    that fits a box. While one row is added, the next one travels. So two rows of boxes are all that sums take, however
    large they are and however many are in flight: the waiter's thread finishes them one after another, in the order in
    which ranks issue them, and all use the same boxes. Each element has the same summands in the same order as if it
    were added whole.

    Args:
        sends: works of what this rank sends.
        rows: the flat tensors that each row is added to.
        receive_row: starts to receive a row into the boxes of the first or the second place.
        waiter: the thread that waits and adds.
    """

    def __init__(
        self,
        sends: Sequence[dist.Work],
        rows: Sequence[Sequence[Tensor]],
        receive_row: Callable[[Sequence[Tensor], int], Row],
        waiter: _Waiter,
    ) -> None:
        super().__init__(sends, waiter)
        self._rows, self._receive_row = rows, receive_row
        self._is_submitted = True
        waiter.submit(self)

    def _receive(self) -> None:
        rows, receive = self._rows, self._receive_row
        del self._rows, self._receive_row  # Whoever waits for this may keep it.
        before: Row | None = None
        for place, row in enumerate(rows):
            posted = receive(row, place % 2)
            if before is not None:
                before.wait()
            before = posted
        if before is not None:
            before.wait()


class _Boxes:
    """Memory for two rows of messages from each of the other ranks. See [Note: rows of a sum]."""

    def __init__(self) -> None:
        self._places = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def take(self, place: int, row: Sequence[Tensor], others: int) -> list[Tensor]:
        """Boxes from ``others`` ranks for what is added to ``row``, at the first or the second place."""
        like = row[0]
        numel = sum([target.numel() for target in row])
        nbytes = others * numel * like.element_size()
        if self._places[place].numel() < nbytes:
            self._places[place] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return list(self._places[place][:nbytes].view(like.dtype).view(others, numel))

    @property
    def held_bytes(self) -> int:
        """The memory that is kept for the next sum."""
        return sum(place.numel() for place in self._places)


class _Waiter:
    """A thread that waits, in the order of submission. It ends when nothing has come for a while, so that nobody has to
    end it, and a worker that still finishes its work when a script ends has one, too."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: collections.deque[_Messages] = collections.deque()
        self._is_running = False

    def submit(self, messages: _Messages) -> None:
        with self._changed:
            self._messages.append(messages)
            self._changed.notify()
            is_running, self._is_running = self._is_running, True
        if not is_running:
            start(self._run, "overlap-messages")

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._messages:
                    self._changed.wait(_IDLE_S)
                if not self._messages:
                    self._is_running = False
                    return
                messages = self._messages[0]
            messages.finish()
            with self._changed:
                self._messages.popleft()
            del messages  # They have memory.

    def unfinished(self) -> list[_Messages]:
        with self._changed:
            return list(self._messages)


class GlooChannel:
    """A Gloo backend over connections of its own; every rank of a group makes it at the same time.

    Made directly and not with ``new_group(use_local_synchronization=True)``: that names a group after the number of
    groups that the rank is in, so ranks in different numbers of groups would wait for each other forever. The functions
    of ``torch.distributed`` accept only groups that it made, so the backend's own methods are called, as those
    functions call them.

    Args:
        store: where the ranks find each other; nothing else is under its prefix.
        rank: this rank's number in the group.
        size: of the group.
        timeout: of each collective.
    """

    scatters_by_messages = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._waiter = _Waiter()
        self._boxes = _Boxes()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._in_flight: list[dist.Work] = []
        self._options: dict[Any, dist.AllreduceOptions] = {}
        # Any: the type stubs lack a backend's collectives.
        self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def size(self) -> int:
        return int(self._backend.size())

    def rank(self) -> int:
        return int(self._backend.rank())

    def all_reduce(self, tensor: Tensor, op: Any) -> list[dist.Work]:
        options = self._options.get(op)
        if options is None:
            options = self._options[op] = dist.AllreduceOptions()
            options.reduceOp = op
        return self._noted(self._backend.allreduce([tensor], options))

    def all_gather(self, output: Tensor, input: Tensor) -> list[dist.Work]:
        return self._noted(self._backend._allgather_base(output, input))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[dist.Work]:
        return self._noted(self._backend._reduce_scatter_base(output, input, dist.ReduceScatterOptions()))

    def broadcast(self, tensor: Tensor, src: int) -> list[dist.Work]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self._noted(self._backend.broadcast([tensor], options))

    def _noted(self, work: dist.Work) -> list[dist.Work]:
        self._in_flight = [*itertools.filterfalse(_is_completed, self._in_flight), work]
        return [work]

    def forget_done(self) -> None:
        """Let go of the tensors of collectives that are done."""
        self._in_flight = list(itertools.filterfalse(_is_completed, self._in_flight))

    def send_recv(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> list[Any]:
        # Receives first, so that a buffer is ready for what a peer sends.
        works = [self._backend.recv([tensor], peer, tag) for tensor, peer in receives]
        works += [self._backend.send([tensor], peer, tag) for tensor, peer in sends]
        return [_Messages(works, self._waiter)] if works else []

    def add_messages(
        self, sends: Sequence[tuple[Tensor, int]], rows: Sequence[Sequence[Tensor]], tag: int
    ) -> list[Any]:
        """Send ``sends``, and add to each of ``rows`` what every other rank sends for it, in the order of ranks."""
        backend, peers = self._backend, self._peers
        works = [backend.send([tensor], peer, tag) for tensor, peer in sends]

        def receive_row(targets: Sequence[Tensor], place: int) -> Row:
            boxes = self._boxes.take(place, targets, len(peers))
            return Row([backend.recv([box], peer, tag) for box, peer in zip(boxes, peers, strict=True)], boxes, targets)

        return [_Sum(works, rows, receive_row, self._waiter)] if peers else []

    def abort(self) -> None:
        """Abandon what is in flight and close the connections; the other ranks see theirs close.

        Returns when nothing that was in flight can still write to its tensors. An operation that has received its data
        still adds it up, which takes moments; one that waits for data will receive none. The wait is bounded all the
        same.
        """
        backend, self._backend = self._backend, None
        in_flight: list[dist.Work | _Messages] = [*self._in_flight, *self._waiter.unfinished()]
        with contextlib.suppress(RuntimeError):
            backend.abort()
        if not all(map(_is_completed, in_flight)):
            # Not where all is done: another rank may still receive what this one has sent.
            _close_connections(backend)
        deadline_s = time.monotonic() + _SETTLING_S
        while not all(map(_is_completed, in_flight)):
            if time.monotonic() > deadline_s:
                _kept.append(backend)
                return
            time.sleep(_LOOKING_S)
