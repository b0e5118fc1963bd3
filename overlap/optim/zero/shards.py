"""Which rank owns which elements of every parameter, and this rank's part as a tensor.

[Note: ownership]

A rank's part of a parameter is a chunk of its elements in the order of its memory, by a formula of the parameter's size
and the number of ranks, never of DDP's buckets, which can be rebuilt. So no rank lists the parts of the others.

By *element*, every rank has one chunk of every parameter, of equal length but for the last ones. On a CPU chunks start
at multiples of 128 bytes: kernels take two vectors of at most 64 bytes at a time, and the rest at the end of a tensor
one element at a time, which rounds differently in 16-bit types. So each element is treated as it would be in the whole
tensor, and results equal those of the plain optimizer bit for bit (with one thread: several cut a long tensor
anywhere). Accelerators treat all elements alike, and chunks are those of ``torch._chunk_cat``. By *parameter*, one rank
owns all of a parameter: the largest are given first, each to the rank that owns least so far. Frozen parameters have no
state, so they are balanced by themselves.

[Note: versions of sharded parameters]

Updates and gathers write parameters through views of ``parameter.data``, whose version counters are their own: some
writes come from the network, some while the next forward runs. So the version of a parameter is raised explicitly and
once, when its update is made. A weight that a later node of this backward still needs is then autograd's error, and
between backward and ``step()`` a version changes only where the training loop writes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.errors import TrainingLoopError, UnsupportedError

_BLOCK_BYTES = 128
# The keys of a group that are not hyperparameters.
_NOT_OPTIONS = ("params", "param_names")

Range = tuple[int, int]


def chunk(numel: int, itemsize: int, *, on_streams: bool, rank: int, ranks: int) -> Range:
    """The elements that ``rank`` owns of ``numel`` that are divided among ``ranks``. See [Note: ownership].

    >>> [chunk(100, 4, on_streams=False, rank=rank, ranks=3) for rank in range(3)]
    [(0, 64), (64, 100), (100, 100)]
    """
    block_numel = 1 if on_streams else max(1, _BLOCK_BYTES // itemsize)
    each = -(-numel // (block_numel * ranks)) * block_numel
    return min(numel, rank * each), min(numel, (rank + 1) * each)


class Owners:
    """Gives whole parameters to ``ranks``. See [Note: ownership]."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # Heaps of the ranks that own something, with the bytes of it, of trained and of frozen parameters.
        self._owned: dict[bool, list[tuple[int, int]]] = {True: [], False: []}

    def assign(self, parameters: Sequence[Tensor]) -> dict[int, int]:
        """The owner of each of ``parameters``, by their ``id``."""
        owners: dict[int, int] = {}
        for parameter in sorted(parameters, key=lambda parameter: -parameter.nbytes):
            owned = self._owned[parameter.requires_grad]
            owned_bytes, owner = heapq.heappop(owned) if len(owned) == self._ranks else (0, len(owned))
            heapq.heappush(owned, (owned_bytes + parameter.nbytes, owner))
            owners[id(parameter)] = owner if parameter.numel() else 0
        return owners


class Shard:
    """One parameter, flat in the order of its memory, and the part of it that this rank's optimizer steps.

    ``own`` is a view of the parameter, so stepping it changes the parameter and costs no memory. With a
    ``master_dtype`` it is a master, a copy that :func:`copy_from_masters` rounds into the parameter. It is ``None`` if
    the optimizer sees whole tensors and another rank owns this one.

    Args:
        parameter: whose memory has no gaps.
        name: in messages.
        master_dtype: that of the master; ``None`` for no master.
        rank, ranks: this one, and how many there are.
        owner: the rank that owns all of it; ``None`` if it is divided.
    """

    def __init__(
        self,
        parameter: Tensor,
        *,
        name: str,
        master_dtype: torch.dtype | None,
        rank: int,
        ranks: int,
        owner: int | None,
    ) -> None:
        if parameter.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} is stored as {parameter.layout}, and ZeRO cuts dense memory: make it parameter.to_dense(), or "
                "leave it to another optimizer"
            )
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            raise UnsupportedError(
                f"{name} of shape {tuple(parameter.shape)} and strides {parameter.stride()} has gaps or overlaps in "
                "memory, so it cannot be cut into chunks: make it .contiguous()"
            )
        self.parameter, self.name, self.has_master = parameter, name, master_dtype is not None
        self.dtype = master_dtype or parameter.dtype
        self.rank, self.ranks, self.owner = rank, ranks, owner
        self.on_streams = has_streams(parameter.device)
        """Whether it is cut, and sent, as on an accelerator."""
        # Of one element without dimensions, state per element and per parameter look alike.
        self.is_whole = owner is not None or parameter.dim() == 0
        """Whether the optimizer sees all of it."""
        self.range = self.range_of(rank)
        """This rank's elements."""
        self.chunk_numel = self.range_of(0)[1]
        """How many the ranks own, but for the last ones; of a parameter that is divided."""
        self.flat = flatten(parameter.data)
        """The parameter's own memory. See [Note: versions of sharded parameters]."""
        self.view = self.flat[slice(*self.range)]
        """This rank's part of it."""
        self.strides = parameter.stride()
        """The parameter's strides when it was cut: the order of its elements in memory."""
        self.pointer = parameter.data_ptr()
        """Where its memory was then."""
        self.published: Tensor | None = None
        """This rank's part of the parameter as a gather through a wire or a load has left it, which the master need not
        round to."""
        self.own: Tensor | None = None
        if not self.is_whole or rank == (owner or 0):
            # A tensor of its own, since the optimizer may ask whether it requires a gradient, and gathers write views.
            view = self.shaped(self.view).detach()
            self.own = view.to(self.dtype, copy=True) if self.has_master else view
            self.own.requires_grad_(parameter.requires_grad)

    def range_of(self, rank: int) -> Range:
        """The elements that ``rank`` owns."""
        numel = self.parameter.numel()
        if self.owner is not None:
            return (0, numel) if rank == self.owner else (0, 0)
        itemsize = self.parameter.element_size()
        return chunk(numel, itemsize, on_streams=self.on_streams, rank=rank, ranks=self.ranks)

    def shaped(self, piece: Tensor) -> Tensor:
        """This rank's flat piece in the shape in which the optimizer sees it."""
        if not self.is_whole:
            return piece
        return piece.as_strided(self.parameter.size(), self.parameter.stride(), int(piece.storage_offset()))

    def gradient(self, *, whole: bool = False) -> Tensor:
        """This rank's part of ``.grad``, or the ``whole``, flat; a view where it is laid out as the parameter is."""
        grad = self.parameter.grad
        assert grad is not None, "asked of parameters with a gradient"
        if grad.is_sparse:
            raise UnsupportedError(f"the gradient of {self.name} is sparse: build the embedding with sparse=False")
        if grad.stride() != self.parameter.stride():
            grad = torch.empty_like(self.parameter, dtype=grad.dtype).copy_(grad)
        start, end = (0, grad.numel()) if whole else self.range
        return flatten(grad)[start:end]

    def refresh(self) -> None:
        """Follow a parameter that was moved to other memory, or changed by other code; called without gradients.

        Raises:
            TrainingLoopError: its elements are in another order than the state.
        """
        if self.parameter.stride() != self.strides:
            raise TrainingLoopError(
                f"{self.name} has strides {self.parameter.stride()}, but had {self.strides}: after "
                "model.to(memory_format=...) remove() the registration, bring the state into the new order by "
                "zero.consolidate_state_dict(to=None); zero.load_state_dict(zero.state_dict()), build "
                "DistributedDataParallel anew and register again"
            )
        if self.parameter.data_ptr() != self.pointer:
            self._cut()
        if self.own is None:
            return
        if self.own.requires_grad != self.parameter.requires_grad:
            self.own.requires_grad_(self.parameter.requires_grad)
        if not self.has_master:
            return
        # Take over elements that other code has changed. By value, since not every edit raises a version; an element
        # that the master still rounds to was not changed, and the master is more exact.
        view = self.shaped(self.view)
        is_kept = view == self.own.to(view.dtype)
        if self.published is not None:
            is_kept |= view == self.published.view_as(view)
        if has_streams(view.device) or not is_kept.all():
            self.own.copy_(torch.where(is_kept, self.own, view.to(self.own.dtype)))

    def follow(self) -> None:
        """The parameter was loaded, and maybe moved, and its master is loaded next."""
        self._cut()
        self.published = self.view.clone() if self.has_master else None

    def _cut(self) -> None:
        """Cut the parameter again, in the memory where it is now; a master and the state stay as they are."""
        # By `.data`, as the parameter itself was moved: values are the same, so the version must not change.
        self.flat.data = flatten(self.parameter.data)
        self.view.data = self.flat[slice(*self.range)]
        if self.own is not None and not self.has_master:
            self.own.data = self.shaped(self.view)
        self.strides = self.parameter.stride()
        self.pointer = self.parameter.data_ptr()


def copy_from_masters(shards: Sequence[Shard]) -> None:
    """Round masters into their parameters."""
    masters = [(shard, own) for shard in shards if (own := shard.own) is not None]
    copy_all([shard.shaped(shard.view) for shard, _ in masters], [own for _, own in masters])
    for shard in shards:
        shard.published = None


def flatten(tensor: Tensor) -> Tensor:
    """A flat view of ``tensor``, whose memory has no gaps, in the order of its memory."""
    detached = tensor.detach()
    return detached.as_strided((tensor.numel(),), (1,), int(detached.storage_offset()))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group to its counterpart."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))
