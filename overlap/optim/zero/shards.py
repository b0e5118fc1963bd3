"""Which rank owns which elements of every parameter, as ranges and as tensors.

[Note: ownership]

A parameter is cut into one range of elements per rank, in the order of its memory. Ranges depend only on the sizes of
the parameters and on the number of ranks, never on DDP's buckets, which can be rebuilt.

By *element*, every rank owns an equal part of every parameter. Ranges start at multiples of 128 bytes: CPU kernels take
two vectors of at most 64 bytes at a time, and the rest at the end of a tensor one element at a time, which rounds
differently in 16-bit types. So each element is treated as it would be in the whole tensor, and results equal those of
the plain optimizer bit for bit (with one thread: several cut a long tensor anywhere). The rest goes to the ranks that
own least so far. By *parameter*, one rank owns all of a parameter; the largest are given first, each to the rank that
owns least so far. Frozen parameters have no state, so they are balanced by themselves.

[Note: versions of sharded parameters]

Updates and gathers write parameters through views of ``parameter.data``, whose version counters are their own: some
writes come from the network, some while the next forward runs. So the version of a parameter is raised explicitly and
once, when its update is made. A weight that a later node of this backward still needs is then autograd's error, and
between backward and ``step()`` a version changes only where the training loop writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.errors import TrainingLoopError, UnsupportedError

__all__ = ["Partition", "Range", "Shard", "copy_options", "flatten", "options_of", "publish"]

_BLOCK_BYTES = 128
# The keys of a group that are not hyperparameters.
_NOT_OPTIONS = ("params", "param_names")

Range = tuple[int, int]


class Partition:
    """Assigns elements to ``ranks`` by ``unit``, ``"element"`` or ``"parameter"``. See [Note: ownership]."""

    def __init__(self, unit: str, ranks: int) -> None:
        self.is_whole = unit == "parameter"
        """Whether a parameter is never cut."""
        self._ranks = range(ranks)
        # Bytes that each rank owns, by pool.
        self._owned: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0] * ranks)

    def assign(self, parameters: Sequence[Tensor], pools: Sequence[Hashable]) -> list[tuple[Range, ...]]:
        """One range per rank for each parameter. Those of one pool, whose state has the same size per element, are
        balanced among themselves."""
        if not self.is_whole:
            return list(map(self._cut, parameters, pools))
        largest_first = sorted(range(len(parameters)), key=lambda place: -parameters[place].nbytes)
        ranges = {place: self._give(parameters[place], pools[place]) for place in largest_first}
        return [ranges[place] for place in range(len(parameters))]

    def _give(self, parameter: Tensor, pool: Hashable) -> tuple[Range, ...]:
        owned = self._owned[pool]
        owner = min(self._ranks, key=lambda rank: (owned[rank], rank))
        owned[owner] += parameter.nbytes
        return tuple((0, parameter.numel()) if rank == owner else (0, 0) for rank in self._ranks)

    def _cut(self, parameter: Tensor, pool: Hashable) -> tuple[Range, ...]:
        numel, itemsize, owned = parameter.numel(), parameter.element_size(), self._owned[pool]
        block_numel = max(1, _BLOCK_BYTES // itemsize)
        blocks = -(-numel // block_numel)
        each, extra = divmod(blocks, len(self._ranks))
        ranges: list[Range] = [(numel, numel)] * len(self._ranks)
        start, given = 0, 0
        # The ranks that own least come first, where the larger ranges are.
        for place, rank in enumerate(sorted(self._ranks, key=lambda rank: (owned[rank], rank))):
            given += each + (place < extra)
            end = numel if given == blocks else given * block_numel
            ranges[rank] = (start, end)
            owned[rank] += (end - start) * itemsize
            start = end
        return tuple(ranges)


class Shard:
    """One parameter, flat in the order of its memory, and the part of it that this rank's optimizer steps.

    ``own`` is a view of the parameter, so stepping it changes the parameter and costs no memory. In another ``dtype``
    it is a master, a copy that :func:`publish` rounds into the parameter. It is ``None`` if the optimizer sees whole
    tensors and another rank owns this one.
    """

    def __init__(
        self,
        parameter: Tensor,
        ranges: tuple[Range, ...],
        rank: int,
        *,
        name: str,
        is_whole: bool,
        dtype: torch.dtype,
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
        self.parameter = parameter
        self.name = name
        self.ranges = ranges
        self.rank = rank
        self.is_whole = is_whole
        flat = flatten(parameter.data)
        self.views = tuple(flat[start:end] for start, end in ranges)
        """The parameter's own memory, cut by rank. See [Note: versions of sharded parameters]."""
        self.strides = parameter.stride()
        """The parameter's strides when it was cut: the order of its elements in memory."""
        self.pointer = parameter.data_ptr()
        """Where its memory was then."""
        self.dtype = dtype
        """The dtype in which the optimizer steps."""
        self.has_master = dtype != parameter.dtype
        self.own: Tensor | None = None
        if not is_whole or rank == max(range(len(ranges)), key=lambda other: ranges[other][1] - ranges[other][0]):
            # A tensor of its own, since the optimizer may ask whether it requires a gradient, and gathers write views.
            view = self.shaped(self.views[rank]).detach()
            self.own = view.to(self.dtype) if self.has_master else view
            self.own.requires_grad_(parameter.requires_grad)

    @property
    def range(self) -> Range:
        """This rank's elements."""
        return self.ranges[self.rank]

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
            self.follow()
        if self.own is None:
            return
        if self.own.requires_grad != self.parameter.requires_grad:
            self.own.requires_grad_(self.parameter.requires_grad)
        if not self.has_master:
            return
        # Take over elements that other code has changed. By value, since not every edit raises a version; an element
        # that the master still rounds to was not changed, and the master is more exact.
        before, view = self.own.to(self.parameter.dtype), self.shaped(self.views[self.rank])
        if has_streams(view.device) or not torch.equal(view, before):
            self.own.copy_(torch.where(view == before, self.own, view.to(self.own.dtype)))

    def follow(self) -> None:
        """Cut the parameter again, in the memory where it is now; a master and the state stay as they are."""
        # By `.data`, as the parameter itself was moved: values are the same, so the version must not change.
        flat = flatten(self.parameter.data)
        for view, (start, end) in zip(self.views, self.ranges, strict=True):
            view.data = flat[start:end]
        if self.own is not None and not self.has_master:
            self.own.data = self.shaped(self.views[self.rank])
        self.strides = self.parameter.stride()
        self.pointer = self.parameter.data_ptr()


def publish(shards: Sequence[Shard]) -> None:
    """Round masters into their parameters."""
    masters = [(shard, own) for shard in shards if (own := shard.own) is not None]
    copy_all([shard.shaped(shard.views[shard.rank]) for shard, _ in masters], [own for _, own in masters])


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
