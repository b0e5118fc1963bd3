"""Process groups, and the backends that carry their collectives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# The package exports these at run time, but not to type checkers.
from torch._C._distributed_c10d import Backend, GradBucket, PrefixStore, Store
from torch.distributed import distributed_c10d

from overlap._torch.foreach import add_all

__all__ = [
    "Channel",
    "GradBucket",
    "GroupChannel",
    "PrefixStore",
    "Row",
    "Store",
    "backend_name",
    "bucket_gradients",
    "group_exists",
    "group_name",
    "group_store",
    "group_timeout",
    "is_future",
    "issued",
    "stride_of",
]

# Renamed in torch 2.13, where the old names warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    return [
        _as_filled(flat, parameter, view, int(view.storage_offset() - buffer.storage_offset()))
        for parameter, view in zip(parameters, views, strict=True)
    ]


def _as_filled(flat: Tensor, parameter: Tensor, view: Tensor, offset: int) -> Tensor:
    has_same_strides = parameter.stride() == view.stride()
    if has_same_strides and flat.dtype == view.dtype:
        return view
    is_dense = has_same_strides or torch.ops.aten.is_non_overlapping_and_dense(parameter)
    strides = parameter.stride() if is_dense else view.stride()
    return flat.as_strided(view.size(), strides, int(flat.storage_offset()) + offset)


def is_future(value: object) -> bool:
    """Whether ``value`` is a future. Private: futures made in C++ are not instances of the public subclass."""
    return isinstance(value, torch._C.Future)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend for tensors on ``device`` in ``group``, such as ``"gloo"`` or ``"nccl"``; ``"none"`` without one."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return "none"
    return name


def group_name(group: dist.ProcessGroup) -> str:
    """What PyTorch calls ``group``, alike on all its ranks. Private: one of a custom backend does not know its name."""
    return str(distributed_c10d._world.pg_names[group])


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store of ``group``. Private: there is no public way to the store of a ``new_group``."""
    if hasattr(group, "get_group_store"):
        try:
            store: Store | None = group.get_group_store()
        except RuntimeError:
            store = None  # The group of a custom backend may have no store.
        if store is not None:
            return store
    kept: Store = distributed_c10d._world.pg_map[group][1]
    return kept


def issued(group: dist.ProcessGroup | Backend) -> int | None:
    """How many collectives this rank has issued on ``group``; ``None`` if its backend does not count them.

    Messages between two ranks count, too.

    Private: there is no public way to ask.
    """
    counting: Any = group
    try:
        return int(counting._get_sequence_number_for_group())
    except RuntimeError:
        return None


def group_exists(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed. Private: ``torch.distributed`` has no public way to ask."""
    return group in distributed_c10d._world.pg_map


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of collectives on ``group``."""
    try:
        options = getattr(group._get_backend(device), "options", None)
    except RuntimeError:
        options = None  # The group has no backend for this device.
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


@dataclass(frozen=True)
class Row:
    """One message from each of the other ranks, which is added when it has been waited for."""

    works: Sequence[dist.Work]
    boxes: Sequence[Tensor]
    """Where it is received from each of the other ranks, in their order."""
    targets: Sequence[Tensor]
    """The flat tensors that its parts are added to, one after another."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait()
        for box in self.boxes:
            add_all(self.targets, box.split_with_sizes([target.numel() for target in self.targets]))
        return True


class Channel(Protocol):
    """Starts collectives; each call returns at once, with the works to wait for. Tensors are real (not complex), and
    ranks are ranks of the channel."""

    @property
    def scatters_by_messages(self) -> bool:
        """Whether messages between ranks make a reduce-scatter that sends less than the channel's own."""
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

    def add_messages(
        self, sends: Sequence[tuple[Tensor, int]], rows: Sequence[Sequence[Tensor]], tag: int
    ) -> Sequence[dist.Work]:
        """Send ``sends``, and add to each of ``rows`` what every other rank sends for it, in the order of ranks."""
        ...


class GroupChannel:
    """A process group, used through PyTorch's public functions."""

    scatters_by_messages = False

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

    def add_messages(
        self, sends: Sequence[tuple[Tensor, int]], rows: Sequence[Sequence[Tensor]], tag: int
    ) -> list[Any]:
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        boxes = [[row[0].new_empty(sum([target.numel() for target in row])) for _ in peers] for row in rows]
        receives = [(box, peer) for of_row in boxes for box, peer in zip(of_row, peers, strict=True)]
        works = self.send_recv(sends, receives, tag)
        return [*works, *(Row((), of_row, row) for of_row, row in zip(boxes, rows, strict=True))]
