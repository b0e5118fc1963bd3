"""Process groups, and below them the backends that carry collectives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# The package exports these at run time, but not to type checkers.
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.distributed import distributed_c10d

from overlap.errors import CollectiveError

__all__ = [
    "Channel",
    "GlooChannel",
    "GradBucket",
    "GroupChannel",
    "PrefixStore",
    "backend_name",
    "bucket_gradients",
    "group_store",
    "group_timeout",
    "is_future",
    "issued",
]

# Renamed in torch 2.13, where the old names warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bucket_gradients(bucket: GradBucket) -> list[Tensor]:
    """Views of the bucket's buffer, one a parameter.

    DDP's buffer holds complex gradients as pairs of real numbers, but its views count pairs and cut single numbers:
    right places, wrong elements.
    """
    views, buffer = list(bucket.gradients()), bucket.buffer()
    if not bucket.parameters()[0].is_complex() or buffer.is_complex():
        return views
    pairs, start = torch.view_as_complex(buffer.view(-1, 2)), buffer.storage_offset()
    return [pairs.as_strided(view.size(), view.stride(), view.storage_offset() - start) for view in views]


def is_future(value: object) -> bool:
    """Whether ``value`` is a future. Private: those that come from C++ are not of the public subclass."""
    return isinstance(value, torch._C.Future)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries collectives of ``device``'s tensors on ``group``, ``"gloo"`` or ``"nccl"``, say."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return "none"
    return name


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store that ``group`` was made with. Private: groups made by ``new_group`` have no public one."""
    if hasattr(group, "get_group_store"):
        try:
            store: Store | None = group.get_group_store()
        except RuntimeError:
            store = None  # A group that a custom backend made without a store of its own.
        if store is not None:
            return store
    return distributed_c10d._world.pg_map[group][1]


def issued(group: dist.ProcessGroup) -> int | None:
    """How many collectives this rank has issued on ``group``, where its backend counts. Private: no public name."""
    counting: Any = group
    try:
        return int(counting._get_sequence_number_for_group())
    except RuntimeError:
        return None


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of ``group`` may take."""
    try:
        options = getattr(group._get_backend(device), "options", None)
    except RuntimeError:
        options = None  # A group that has no backend of the device by itself.
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


class Channel(Protocol):
    """Starts collectives; every call returns at once with what to wait for. Tensors are real, ranks the channel's."""

    @property
    def moves_halves(self) -> bool:
        """Whether a reduce-scatter must be put together from messages to send less than an all-reduce."""
        ...

    def size(self) -> int: ...

    def rank(self) -> int: ...

    def all_reduce(self, tensor: Tensor, op: Any) -> Sequence[dist.Work]: ...

    def all_gather(self, output: Tensor, input: Tensor) -> Sequence[dist.Work]: ...

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Sequence[dist.Work]: ...

    def broadcast(self, tensor: Tensor, src: int) -> Sequence[dist.Work]: ...

    def send_recv(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[dist.Work]: ...

    def abort(self) -> threading.Thread | None: ...


class GroupChannel:
    """A registered process group, by PyTorch's public functions."""

    moves_halves = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.size()

    def rank(self) -> int:
        return self._group.rank()

    def all_reduce(self, tensor: Tensor, op: Any) -> list[Any]:
        return [dist.all_reduce(tensor, op=op, group=self._group, async_op=True)]

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        return [_all_gather(output, input, group=self._group, async_op=True)]

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[Any]:
        return [_reduce_scatter(output, input, group=self._group, async_op=True)]

    def broadcast(self, tensor: Tensor, src: int) -> list[Any]:
        return [dist.broadcast(tensor, group_src=src, group=self._group, async_op=True)]

    def send_recv(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> list[Any]:
        operations = [
            dist.P2POp(function, tensor, group=self._group, tag=tag, group_peer=peer)
            for function, messages in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer in messages
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def abort(self) -> None:
        """Nothing to give up: the group is the user's."""


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


class _Message:
    """The work of a message between two ranks on Gloo, which must not be waited for in slices.

    A wait that times out closes the connection, and the work says that it is completed whatever happens.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait()

    def is_completed(self) -> bool:
        return True


class GlooChannel:
    """A Gloo backend with the ranks of ``group`` and connections of its own; every member makes it, with one ``key``.

    Made directly and not with ``new_group(use_local_synchronization=True)``: that names a group after the number of
    groups that the rank is in, so ranks that are in different numbers of groups wait for each other for ever. The
    functions of ``torch.distributed`` know only groups made by it, so the backend's own methods are called, as they
    call them.
    """

    moves_halves = True

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._store = PrefixStore(f"overlap/{key}", group_store(group))
        timeout = group_timeout(group, torch.device("cpu"))
        try:
            # Any: the type stubs leave a backend's collectives out.
            self._backend: Any = self._connected(group, timeout)
        except RuntimeError as error:
            missing = self._missing(group)
            raise CollectiveError(
                f"rank {group.rank()} could not connect with the other ranks in {timeout.total_seconds():.0f} s: "
                + (f"ranks {missing} did not come; " if missing else "all came, but one has ended since; ")
                + "every rank of the model's process group must register the same stages and run backward"
            ) from error

    def _connected(self, group: dist.ProcessGroup, timeout: timedelta) -> Any:
        self._store.set(f"came/{group.rank()}", "")
        backend = dist.ProcessGroupGloo(self._store, group.rank(), group.size(), timeout=timeout)
        # Gloo returns while others are still connecting: a rank that is done and gone by then would fail them.
        if self._store.add("connected", 1) == group.size():
            self._store.set("all connected", "")
        self._store.wait(["all connected"], timeout)
        return backend

    def _missing(self, group: dist.ProcessGroup) -> list[int]:
        try:
            return [rank for rank in range(group.size()) if not self._store.check([f"came/{rank}"])]
        except RuntimeError:
            return []  # The store went with the rank that had it.

    def size(self) -> int:
        return int(self._backend.size())

    def rank(self) -> int:
        return int(self._backend.rank())

    def all_reduce(self, tensor: Tensor, op: Any) -> list[dist.Work]:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return [self._backend.allreduce([tensor], options)]

    def all_gather(self, output: Tensor, input: Tensor) -> list[dist.Work]:
        return [self._backend._allgather_base(output, input)]

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[dist.Work]:
        return [self._backend._reduce_scatter_base(output, input, dist.ReduceScatterOptions())]

    def broadcast(self, tensor: Tensor, src: int) -> list[dist.Work]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return [self._backend.broadcast([tensor], options)]

    def send_recv(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> list[Any]:
        # Receives first, so that what a peer sends finds its buffer.
        works = [self._backend.recv([tensor], peer, tag) for tensor, peer in receives]
        works += [self._backend.send([tensor], peer, tag) for tensor, peer in sends]
        return [_Message(work) for work in works]

    def abort(self) -> threading.Thread:
        """End what is in flight and close the connections; the other ranks see theirs close.

        Returns the thread that does it, and alone keeps the backend: with three ranks and more, Gloo now and then waits
        for an operation to time out when the backend is destroyed.
        """
        thread = threading.Thread(target=_abort, args=(self._backend,), name="overlap-abort", daemon=True)
        self._backend = None
        thread.start()
        return thread
