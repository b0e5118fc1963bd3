"""Process groups, the backends that carry their collectives, and private Gloo backends."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# The package exports these at run time, but not to type checkers.
from torch._C._distributed_c10d import AllgatherOptions, Backend, GradBucket, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from overlap._threads import start
from overlap._torch.foreach import add_all

__all__ = ["GradBucket", "PrefixStore", "TCPStore"]

_CPU = torch.device("cpu")
_POLL_INTERVAL_S = 0.002
_IDLE_S = 0.05
# How long an abort waits for works in flight.
_SETTLING_S = 5.0
# The tag of messages on a group that is the user's, far from others' tags.
_TAG = 1 << 20
# The last tag of messages that no rank sends.
_NEVER_SENT = 2**31 - 1

# Backends whose operations did not end when they were aborted: Gloo's destructor would wait for these, with the
# interpreter's lock.
_kept: list[Any] = []

# In errors of Gloo's, some of which have no place in its sources.
_SIGNS = ("/gloo/", "Application timeout caused pair closure", "Operation timed out!")


stride_of: Callable[[Tensor], tuple[int, ...]] = operator.methodcaller("stride")


def bucket_gradients(bucket: GradBucket) -> list[Tensor]:
    """Views of the bucket's buffer, one per parameter, as the reducer fills it.

    The reducer gives a gradient the parameter's own strides where those leave no gaps, as in ``channels_last``, but
    DDP's own views of the buffer are contiguous, so they show the wrong elements. So do those of complex gradients,
    which the buffer holds as pairs of real numbers: the views count in complex numbers and then select real ones.
    """
    buffer, parameters, views = bucket.buffer(), bucket.parameters(), bucket.gradients()
    is_in_pairs = parameters[0].is_complex() and not buffer.is_complex()
    if not is_in_pairs and list(map(stride_of, parameters)) == list(map(stride_of, views)):
        return views
    flat = torch.view_as_complex(buffer.view(-1, 2)) if is_in_pairs else buffer
    filled = []
    for parameter, view in zip(parameters, views, strict=True):
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = parameter.stride() if is_dense else view.stride()
        offset = int(view.storage_offset() - buffer.storage_offset() + flat.storage_offset())
        filled.append(flat.as_strided(view.size(), strides, offset))
    return filled


def is_future(value: object) -> bool:
    """Whether ``value`` is a future. Private: futures made in C++ are not instances of the public subclass."""
    return isinstance(value, torch._C.Future)


# Groups. Private, all of them: there is no public way to ask.


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend for tensors on ``device`` in ``group``, such as ``"gloo"``, ``"nccl"`` or ``"nccl2"``; ``"none"``
    without one. All of torchcomms are ``"torchcomms"``, also its Gloo: they are wrapped, and lack its methods.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return "none"
    return "torchcomms" if type(backend).__module__.startswith("torchcomms") else str(backend.name())


def group_name(group: dist.ProcessGroup) -> str:
    """PyTorch's name of ``group``, the same on all its ranks. One of a custom backend does not know its own."""
    return str(distributed_c10d._world.pg_names[group])


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store of ``group``."""
    with contextlib.suppress(RuntimeError):  # The group of a custom backend may have no store.
        if (store := group.get_group_store()) is not None:
            return store
    kept: Store = distributed_c10d._world.pg_map[group][1]
    return kept


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    try:
        options = getattr(group._get_backend(device), "options", None)
    except RuntimeError:
        options = None  # The group has no backend for this device.
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


def new_group_of(
    ranks: Sequence[int], name: str, *, backends: str, timeout: timedelta, has_priority: bool = True
) -> dist.ProcessGroup:
    """The group of these ``ranks`` of the job, in this order, which they alone make, all at the same time.

    PyTorch names such a group after the number of groups that a rank is in. Ranks in different numbers of groups would
    wait for each other forever, and a group made anew would find the addresses of the one before. So the name is given,
    the same on its ranks and new in the job.

    With ``has_priority`` the collectives of NCCL run on streams of the highest priority, as FSDP2's do: a message that
    waits for blocks of a large kernel is late for all that follow.
    """
    options: Any = None
    if has_priority and dist.is_nccl_available() and "nccl" in backends:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    # Newer annotations include a number for ranks that are not in the group, which these are.
    new_group: Any = dist.new_group
    module: Any = distributed_c10d
    named, module._process_group_name = module._process_group_name, lambda ranks, use_hashed_name: name
    try:
        made: dist.ProcessGroup = new_group(
            list(ranks),
            timeout=timeout,
            backend=backends,
            pg_options=options,
            use_local_synchronization=True,
            sort_ranks=False,
        )
    finally:
        module._process_group_name = named
    return made


def issued(group: dist.ProcessGroup | Backend) -> int | None:
    """The number of collectives and messages that this rank has issued on ``group``; ``None`` where the backend does
    not count them."""
    counting: Any = group
    try:
        return int(counting._get_sequence_number_for_group())
    except RuntimeError:
        return None


# Failures.


def has_lost_connection(error: BaseException) -> bool:
    """Whether ``error``, or one that caused it, is Gloo's: another rank's process has ended, say, or does not come."""
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    ):
        return True
    return error.__cause__ is not None and has_lost_connection(error.__cause__)


def abandon_group(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, so that other ranks that wait on them raise; it is of no use afterwards.

    Those of other backends are aborted on this rank; there the other ranks wait for their timeout.
    """
    if backend_name(group, _CPU) == "gloo":
        _close_connections(group._get_backend(_CPU))
    else:
        group.abort()


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
                    backend.recv([torch.empty(1, device=_CPU)], rank, tag).wait(timedelta(milliseconds=1))


# Channels.


def _asynchronous(options: Any, op: Any = None) -> Any:
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    return options


_SUM = dist.ReduceOp.SUM
_OF_SUM, _OF_GATHER = _asynchronous(dist.AllreduceOptions(), _SUM), _asynchronous(AllgatherOptions())
_OF_SCATTER, _OF_ALL_TO_ALL = _asynchronous(dist.ReduceScatterOptions(), _SUM), _asynchronous(dist.AllToAllOptions())


class GroupChannel:
    """Starts collectives on a process group, through PyTorch's public functions.

    Each call returns at once, with the works to wait for. Tensors are real (not complex), and ranks are ranks of the
    channel. Collectives of a bucket are the group's own methods, called as the public functions call them: those take
    the host twice as long.
    """

    lasts = True
    """Whether it serves its group as long as that lives; else it is made anew after a failure."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group  # The type stubs lack some methods.

    def size(self) -> int:
        return int(self._group.size())

    def rank(self) -> int:
        return int(self._group.rank())

    def all_reduce(self, tensor: Tensor, op: Any) -> list[Any]:
        options = _OF_SUM if op is _SUM else _asynchronous(dist.AllreduceOptions(), op)
        return [self._group.allreduce([tensor], options)]

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        return [self._group.all_gather_single(output, input, _OF_GATHER)]

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[Any]:
        return [self._group.reduce_scatter_single(output, input, _OF_SCATTER)]

    def send_recv(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Any]:
        operations = [
            dist.P2POp(function, tensor, group=self._group, tag=_TAG, group_peer=peer)
            for function, messages in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer in messages
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def has_all_to_all(self, device: torch.device) -> bool:
        return backend_name(self._group, device) == "nccl"

    def all_to_all(self, outputs: Tensor, inputs: Tensor) -> list[Any]:
        """Send ``inputs[r]`` to each rank ``r`` and receive from it into ``outputs[r]``, by one collective."""
        return [self._group.all_to_all_single(outputs, inputs, [], [], _OF_ALL_TO_ALL)]

    def each(self, name: str, tensors: Sequence[tuple[Tensor, int]]) -> list[Any]:
        """``"reduce"`` each tensor to its rank, or ``"broadcast"`` it from there, by one launch if the backend can."""
        group, device = self._group, tensors[0][0].device
        call, root = (dist.reduce, "group_dst") if name == "reduce" else (dist.broadcast, "group_src")

        def launched() -> list[Any]:
            return [call(tensor, **{root: rank}, group=group, async_op=True) for tensor, rank in tensors]

        # As torch.distributed.batch_isend_irecv asks.
        if type(group) is not dist.ProcessGroup or not group._get_backend(device).supports_coalescing:
            return launched()
        with distributed_c10d._coalescing_manager(group, device, async_ops=True) as together:
            launched()
        return list(together.works)

    def add_messages(self, sends: Sequence[tuple[Tensor, int]], rows: Sequence[Sequence[Tensor]]) -> list[Any]:
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        boxes = [[row[0].new_empty(sum([target.numel() for target in row])) for _ in peers] for row in rows]
        receives = [(box, peer) for of_row in boxes for box, peer in zip(of_row, peers, strict=True)]
        works = self.send_recv(sends, receives)
        return [*works, *(_Row((), of_row, row) for of_row, row in zip(boxes, rows, strict=True))]


class _Row:
    """One message from each of the other ranks, which is added when it has been waited for."""

    def __init__(self, works: Sequence[dist.Work], boxes: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._works, self._boxes, self._targets = works, boxes, targets

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        for box in self._boxes:
            add_all(self._targets, box.split_with_sizes([target.numel() for target in self._targets]))
        return True


class GlooChannel:
    """As :class:`GroupChannel`, a Gloo backend over connections of its own; every rank of a group makes it at the same
    time.

    Made directly and not with ``new_group(use_local_synchronization=True)``: that names a group after the number of
    groups that the rank is in, so ranks in different numbers of groups would wait for each other forever. The functions
    of ``torch.distributed`` accept only groups that it made, so the backend's own methods are called, as those
    functions call them.

    [Note: rows of a sum]

    Messages that are added up need memory until then. Gloo sends a message when its receiver is ready for it, so a rank
    posts all its sends at once, and receives a row at a time: the part of a message from each of the others that fits a
    box. While one row is added, the next one travels. So two rows of boxes are all that sums take, however large they
    are and however many are in flight: the waiter's thread finishes them one after another, in the order in which ranks
    issue them, and all use the same boxes. Each element has the same summands in the same order as if it were added
    whole. Nothing else is under the prefix of ``store``, where the ranks find each other.
    """

    lasts = False

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._waiter = _Waiter()
        self.sum_memory = [torch.empty(0, dtype=torch.uint8, device=_CPU)] * 2
        """For the messages of two rows: see [Note: rows of a sum]."""
        # Of messages, the same on every rank: those of a sum are received later than ones that were sent after them.
        self._tags = itertools.count()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._in_flight: list[dist.Work] = []
        # Any: the type stubs lack a backend's collectives.
        self._backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def size(self) -> int:
        return int(self._backend.size())

    def rank(self) -> int:
        return int(self._backend.rank())

    def all_reduce(self, tensor: Tensor, op: Any) -> list[Any]:
        options = _OF_SUM if op is _SUM else _asynchronous(dist.AllreduceOptions(), op)
        return self._noted(self._backend.allreduce([tensor], options))

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        return self._noted(self._backend._allgather_base(output, input))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[Any]:
        """By messages, which send half as much as Gloo's own."""
        rank, size = self.rank(), len(self._peers) + 1
        own, chunks = output.view(-1), input.view(size, -1)
        if own.data_ptr() != chunks[rank].data_ptr():
            own.copy_(chunks[rank])
        # Each rank starts with the next one, so that not all send to the same rank at once.
        peers = [(rank + distance) % size for distance in range(1, size)]
        return self.add_messages([(chunks[peer], peer) for peer in peers], [[own]])

    def _noted(self, work: dist.Work) -> list[Any]:
        self._in_flight = [*itertools.filterfalse(_is_completed, self._in_flight), work]
        return [work]

    def forget_done(self) -> None:
        """Let go of the tensors of collectives that are done."""
        self._in_flight = list(itertools.filterfalse(_is_completed, self._in_flight))

    def send_recv(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Any]:
        tag = next(self._tags)
        # Receives first, so that a buffer is ready when a peer sends.
        works = [self._backend.recv([tensor], peer, tag) for tensor, peer in receives]
        works += [self._backend.send([tensor], peer, tag) for tensor, peer in sends]
        return [_Messages(works, self._waiter)] if works else []

    def add_messages(self, sends: Sequence[tuple[Tensor, int]], rows: Sequence[Sequence[Tensor]]) -> list[Any]:
        backend, peers, memory, tag = self._backend, self._peers, self.sum_memory, next(self._tags)
        if not peers:
            return []

        def receive() -> None:
            before: _Row | None = None
            for place, row in enumerate(rows):
                numel, dtype = sum([target.numel() for target in row]), row[0].dtype
                nbytes = len(peers) * numel * dtype.itemsize
                if memory[place % 2].numel() < nbytes:
                    memory[place % 2] = torch.empty(nbytes, dtype=torch.uint8, device=_CPU)
                boxes = list(memory[place % 2][:nbytes].view(dtype).view(len(peers), numel))
                works = [backend.recv([box], peer, tag) for box, peer in zip(boxes, peers, strict=True)]
                if before is not None:
                    before.wait()
                before = _Row(works, boxes, row)
            if before is not None:
                before.wait()

        return [_Messages([backend.send([tensor], peer, tag) for tensor, peer in sends], self._waiter, receive)]

    def abort(self) -> None:
        """Abandon the works in flight and close the connections; the other ranks see theirs close.

        Returns when nothing that was in flight can still write to its tensors. An operation that has received its data
        still adds it up, which takes moments; one that waits for data will receive none. The wait is bounded all the
        same: where a connection closes in the middle of a message, Gloo does not wake the one that receives it before
        its timeout. It also runs in a finalizer, of a small model that was dropped in the middle of a pass, and waits
        there, too: if nothing here did, Gloo's destructor would, without a bound and with the interpreter's lock.
        """
        backend, self._backend = self._backend, None
        in_flight: list[dist.Work | _Messages] = [*self._in_flight, *self._waiter.unfinished()]
        with contextlib.suppress(RuntimeError):
            backend.abort()
        if not all(map(_is_completed, in_flight)):
            # Not where all is done: another rank may still receive messages of this one.
            _close_connections(backend)
        deadline_s = time.monotonic() + _SETTLING_S
        while not all(map(_is_completed, in_flight)):
            if time.monotonic() > deadline_s:
                _kept.append(backend)
                return
            time.sleep(_POLL_INTERVAL_S)


Channel: TypeAlias = GroupChannel | GlooChannel


class _Messages:
    """The works of messages between two ranks on Gloo, as one that can be waited for with a timeout.

    A wait of their own with a timeout would close the connection when it times out, and they always say that they are
    completed. So ``waiter`` waits for them without one, after it has called ``receive``, and whoever waits here can
    poll meanwhile whether another rank has failed, which will send nothing.
    """

    def __init__(self, works: Sequence[dist.Work], waiter: _Waiter, receive: Callable[[], None] | None = None) -> None:
        self._works, self._receive = works, receive
        self._is_over = threading.Event()
        self._error: Exception | None = None
        waiter.submit(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("no message has come yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def finish(self) -> None:
        """Wait for them, however long that takes."""
        receive, self._receive = self._receive, None  # It has gradients, and whoever waits may keep this.
        try:
            if receive is not None:
                receive()
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error.with_traceback(None)  # Whose frames keep gradients and the backend.
        self._is_over.set()


_is_completed: Callable[[dist.Work | _Messages], bool] = operator.methodcaller("is_completed")


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


_side_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def side_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A Gloo group of the ranks of ``group``, made once by all of them and no others, for tensors in CPU memory; its
    collectives do not mix with those of training, also from a thread."""
    if (found := _side_groups.get(group)) is None:
        ranks, name = dist.get_process_group_ranks(group), f"overlap/{group_name(group)}/side"
        timeout = distributed_c10d.default_pg_timeout
        found = _side_groups[group] = new_group_of(ranks, name, backends="gloo", timeout=timeout, has_priority=False)
    return found
