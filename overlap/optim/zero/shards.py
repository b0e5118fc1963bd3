"""What this rank owns: its part of every parameter, and of the parameters in a bucket, as tensors.

[Note: versions of sharded parameters]

Updates and gathers write parameters through views of ``parameter.data``, whose version counters are their own: some
writes come from the network, some while the next forward runs. So the version of a parameter is raised explicitly and
once, when its update is made. A weight that a later node of this backward still needs is
then autograd's error, and between backward and ``step()`` a version changes only where the training loop writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket
from overlap.hooks.segments import segment_multiple
from overlap.optim.zero.gather_parts import bytes_at_once, least_part_bytes, parts_by_need
from overlap.optim.zero.partition import (
    ByElement,
    ByParameter,
    Extent,
    Layout,
    Partition,
    Range,
    check_same_on_all_ranks,
    device_of,
    is_narrower,
    names_of,
    orthogonalization_flops,
)

__all__ = [
    "BucketShards",
    "Ownership",
    "Shard",
    "beginning",
    "beginnings",
    "flatten",
    "in_elements",
    "reduced",
    "shards_of_bucket",
]


class Ownership:
    """Divides parameters among the ranks of a group, one parameter group after another. See [Note: ownership]."""

    def __init__(self, group: dist.ProcessGroup, partition: str, master_dtype: torch.dtype | None) -> None:
        self.shards: dict[int, Shard] = {}
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        self.group = group
        self.version = object()
        """Another object when parameters are added; they never leave."""
        self._settings = (partition, str(master_dtype))
        self._master_dtype = master_dtype
        ranks = group.size()
        self._partition: Partition = ByParameter(ranks) if partition == "parameter" else ByElement(ranks)

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of all ranks that want a gradient."""
        return [shard.parameter for shard in self.shards.values() if shard.parameter.requires_grad]

    def add(
        self,
        groups: list[dict[str, Any]],
        *,
        first_group: int,
        orthogonalizes: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Make the shards of new groups; returns the groups of chunks for this rank's optimizer.

        Args:
            groups: with their parameters.
            first_group: the place of the first.
            orthogonalizes: in how many steps the optimizer orthogonalizes the matrices of each group.

        Issues: one gather of a few bytes per parameter.

        Raises:
            ConfigurationError: a parameter is there twice, or the ranks have different ones.
            UnsupportedError: a parameter cannot be cut.
        """
        names = names_of(groups, first_group=first_group)
        pairs = [(place, p) for place, group in enumerate(groups, start=first_group) for p in group["params"]]
        known = {key: shard.name for key, shard in self.shards.items()}
        for name, (_, parameter) in zip(names, pairs, strict=True):
            if id(parameter) in known:
                raise ConfigurationError(f"{name} is the same as {known[id(parameter)]}; pass each parameter once")
            known[id(parameter)] = name
        device_of([*(s.parameter for s in self.shards.values()), *(p for _, p in pairs)])  # Raises where there are two.
        steps = dict(enumerate(orthogonalizes, start=first_group))
        settings = [*self._settings]
        if any(orthogonalizes):
            settings.append(f"ns_steps={list(orthogonalizes)}")
        check_same_on_all_ranks(groups, names, self.group, tuple(settings))
        extents = [
            Extent(
                p.numel(),
                p.element_size(),
                p.requires_grad,
                pool=(place, p.dtype),
                flops=orthogonalization_flops(p, steps[place]),
            )
            for place, p in pairs
        ]
        ranges = self._partition.assign(extents)
        made = [
            Shard(
                parameter,
                owned,
                self.group.rank(),
                name=name,
                # Of one element without dimensions, state per element and per parameter look alike.
                is_whole=self._partition.is_whole or parameter.dim() == 0,
                master_dtype=self._master_dtype,
            )
            for name, (_, parameter), owned in zip(names, pairs, ranges, strict=True)
        ]
        self.shards.update((id(shard.parameter), shard) for shard in made)
        self.version = object()
        return [self._chunks(group) for group in groups]

    def _chunks(self, group: dict[str, Any]) -> dict[str, Any]:
        shards = [self.shards[id(parameter)] for parameter in group["params"]]
        chunks = {**group, "params": [shard.own for shard in shards if shard.own is not None]}
        if "param_names" in group:
            chunks["param_names"] = [shard.name for shard in shards if shard.own is not None]
        return chunks

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return device_of([shard.parameter for shard in self.shards.values()])


class Shard:
    """One parameter, flat in the order of its memory, and the part of it that this rank's optimizer steps.

    ``own`` is a view of the parameter, so stepping it changes the parameter and costs no memory. With a wider
    ``master_dtype`` it is a copy in that dtype, which :meth:`publish` rounds into the parameter; after
    :meth:`keep_true` it is a copy in any case. It is ``None`` if the optimizer sees whole tensors and another rank owns
    this one.
    """

    def __init__(
        self,
        parameter: Tensor,
        ranges: tuple[Range, ...],
        rank: int,
        *,
        name: str,
        is_whole: bool,
        master_dtype: torch.dtype | None,
    ) -> None:
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
        self.has_master = is_narrower(parameter, master_dtype)
        self.dtype = master_dtype if self.has_master and master_dtype is not None else parameter.dtype
        """That of what the optimizer steps."""
        self.own: Tensor | None = None
        if not is_whole or rank == max(range(len(ranges)), key=lambda other: ranges[other][1] - ranges[other][0]):
            # A tensor of its own, since the optimizer may ask whether it requires a gradient, and gathers write views.
            view = self.shaped(self.views[rank]).detach()
            self.own = view.to(master_dtype) if self.has_master else view
            self.own.requires_grad_(parameter.requires_grad)
        self.published: Tensor | None = None
        """What the parameter held of this rank's part when the update last wrote it; ``None`` unless :meth:`keep_true`
        was called."""

    @property
    def range(self) -> Range:
        """The elements that this rank owns."""
        return self.ranges[self.rank]

    def foreign_element(self) -> int | None:
        """The place of an element that this rank does not own, in the order of memory."""
        start, end = self.range
        return 0 if start > 0 else (end if end < self.parameter.numel() else None)

    def shaped(self, piece: Tensor) -> Tensor:
        """This rank's flat piece in the shape in which the optimizer sees it."""
        if not self.is_whole:
            return piece
        return piece.as_strided(self.parameter.size(), self.parameter.stride(), int(piece.storage_offset()))

    def gradient(self) -> Tensor:
        """This rank's part of ``.grad``, flat; a view of it if its memory is laid out as the parameter's."""
        grad = self.parameter.grad
        assert grad is not None, "asked of parameters with a gradient"
        if grad.is_sparse:
            raise UnsupportedError(f"the gradient of {self.name} is sparse: build the embedding with sparse=False")
        if grad.stride() != self.parameter.stride():
            grad = torch.empty_like(self.parameter, dtype=grad.dtype).copy_(grad)
        start, end = self.range
        return flatten(grad)[start:end]

    @property
    def is_permuted(self) -> bool:
        """Whether the parameter's memory format has changed, so that its elements are in another order."""
        return self.parameter.stride() != self.strides

    def refresh(self) -> None:
        """Take note of a parameter that was moved to other memory, or changed by other code; called without gradients.

        Raises:
            TrainingLoopError: the elements of the parameter are in another order than the state.
        """
        if self.is_permuted:
            raise TrainingLoopError(
                f"{self.name} has strides {self.parameter.stride()}, but had {self.strides}: after "
                "model.to(memory_format=...) remove() the registration, build DistributedDataParallel anew and "
                "register again, which brings the optimizer's state into the new order"
            )
        if self.parameter.data_ptr() != self.pointer:
            self.follow()
        if self.own is not None and self.own.requires_grad != self.parameter.requires_grad:
            self.own.requires_grad_(self.parameter.requires_grad)
        if self.published is not None:
            self._follow_edits(self.published)
        elif self.has_master and self.own is not None:
            # An element that the master still rounds to was not changed, and the master is more exact. By value, since
            # not every edit raises a version.
            self._follow_edits(self.own.to(self.parameter.dtype))

    def _follow_edits(self, before: Tensor) -> None:
        """Take over into the master the elements of the parameter that are not what they were ``before``."""
        assert self.own is not None, "there is a master"
        view = self.shaped(self.views[self.rank])
        if not has_streams(view.device) and torch.equal(view, before):
            return
        # By `.data`, since a copy made by keep_true() counts versions with the parameter, which backward may need.
        self.own.data.copy_(torch.where(view == before, self.own, view.to(self.own.dtype)))
        if self.published is not None:
            self.published.copy_(view)

    @torch.no_grad()
    def keep_true(self) -> None:
        """From now on let the optimizer step a copy that the parameter need not equal, and remember what the parameter
        holds, so that a change by other code is seen.

        Adds two copies of this rank's part, in the dtype of :attr:`own` (one that is there already stays) and in the
        parameter's.
        """
        if self.own is None or self.published is not None:
            return
        if self.has_master:
            self.refresh()
        else:
            self.own.data = self.own.detach().clone()
            self.has_master = True
        self.published = self.shaped(self.views[self.rank]).clone()

    def write_difference(self, out: Tensor) -> None:
        """Write what the parameter lacks of the master to ``out``, flat and in fp32."""
        assert self.own is not None, "asked of a part that this rank owns"
        wide = torch.promote_types(self.own.dtype, torch.float32)
        self.shaped(out).copy_(self.own.to(wide) - self.shaped(self.views[self.rank]))

    def follow(self) -> None:
        """Cut the parameter again, where and as it lies in memory now; a master and the state stay as they are."""
        # By `.data`, as the parameter itself was moved: values are the same, so the version must not change.
        flat = flatten(self.parameter.data)
        for view, (start, end) in zip(self.views, self.ranges, strict=True):
            view.data = flat[start:end]
        if self.own is not None and not self.has_master:
            self.own.data = self.shaped(self.views[self.rank])
        self.strides = self.parameter.stride()
        self.pointer = self.parameter.data_ptr()

    def publish(self) -> None:
        """Round the master, if there is one, into the parameter."""
        if self.has_master and self.own is not None:
            self.shaped(self.views[self.rank]).copy_(self.own)

    def note_written(self) -> None:
        """The update itself has written the parameter."""
        if self.published is not None:
            self.published.copy_(self.shaped(self.views[self.rank]))


def flatten(tensor: Tensor) -> Tensor:
    """A flat view of ``tensor``, whose memory has no gaps, in the order of its memory."""
    detached = tensor.detach()
    return detached.as_strided((tensor.numel(),), (1,), int(detached.storage_offset()))


class BucketShards:
    """Cuts the buffers of a bucket into the pieces that each rank owns."""

    def __init__(self, layout: Layout, shards: tuple[Shard | None, ...], rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._shards = tuple(shard for shard in shards if shard is not None)
        self.segment = layout.segment(rank)
        self._slice = layout.of_rank(rank)
        self._by_place = shards

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    @cached_property
    def owned(self) -> tuple[Shard, ...]:
        """The shards that this rank's optimizer has a part of, which may be empty."""
        return tuple(shard for shard in self._shards if shard.own is not None)

    @cached_property
    def parameter_pieces(self) -> list[Tensor]:
        """The parameters' own memory, in packed order."""
        return [
            shard.views[piece.rank]
            for piece in self.layout.pieces
            if (shard := self._by_place[piece.place]) is not None
        ]

    @cached_property
    def owning(self) -> tuple[Shard, ...]:
        """The shards of the pieces that this rank owns, in packed order."""
        found = (self._by_place[piece.place] for piece in self.layout.pieces[self._slice])
        return tuple(shard for shard in found if shard is not None)

    @cached_property
    def are_sharded(self) -> list[bool]:
        """For each parameter of the bucket, whether it is sharded."""
        return [shard is not None for shard in self._by_place]

    def own_of(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of ``pieces``, in packed order, that this rank owns."""
        return pieces[self._slice]

    def others_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``pieces`` that other ranks own."""
        return [*pieces[: self._slice.start], *pieces[self._slice.stop :]]

    def by_rank(self, pieces: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """``pieces``, in packed order, of each rank."""
        return list(map(pieces.__getitem__, self.layout.by_rank))

    def cut_packed(self, packed: Tensor) -> list[Tensor]:
        """The pieces of a packed buffer."""
        return _cut(packed, self.layout.packed_cuts)

    def cut_flat(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a flat buffer, in packed order."""
        return _cut(flat, self.layout.flat_cuts)

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`owned` in a flat buffer of gradients, empty parts included."""
        return list(map(flat.__getitem__, self._own_slices))

    @cached_property
    def _own_slices(self) -> list[slice]:
        return [
            place for shard, place in zip(self._by_place, self._slices, strict=True) if shard and shard.own is not None
        ]

    @cached_property
    def _slices(self) -> list[slice]:
        """Where this rank's part of each parameter is in a flat buffer; empty for one that is not sharded."""
        starts = itertools.accumulate(self.layout.numels, initial=0)
        ranges = [(0, 0) if shard is None else shard.range for shard in self._by_place]
        return [slice(start + first, start + end) for start, (first, end) in zip(starts, ranges, strict=False)]

    def means(self, flat: Tensor) -> tuple[Tensor | None, ...]:
        """Where this rank has the mean after a reduction of ``flat``, for each parameter of the bucket: its own part of
        a sharded one; ``None`` for one that is not sharded."""
        parts: list[Tensor | None] = []
        # DDP's buffer holds a complex gradient as pairs of real numbers.
        is_paired = not flat.is_complex() and self._shards[0].parameter.is_complex()
        for shard, place in zip(self._by_place, self._slices, strict=True):
            if shard is None:
                parts.append(None)
            else:
                parts.append(flat[2 * place.start : 2 * place.stop] if is_paired else flat[place])
        return tuple(parts)

    @cached_property
    def has_rest(self) -> bool:
        """Whether some of the bucket's parameters are not sharded."""
        return not all(self.are_sharded)

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        lengths, chosen = self.layout.flat_cuts
        if len(chosen) == len(lengths):
            return []
        taken = set(chosen)
        return [part for place, part in enumerate(flat.split_with_sizes(lengths)) if place not in taken]

    @cached_property
    def parts(self) -> tuple[BucketShards, ...]:
        """The bucket in parts that are gathered one by one, the last parameters first. See [Note: parts of a gather]
        in :mod:`overlap.optim.zero.gather_parts`."""
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        least_bytes = least_part_bytes(self._shards[0].parameter.device)
        if not self.layout.is_even or sum(sizes_bytes) < 2 * least_bytes:
            return (self,)
        return tuple(self._part(places) for places in parts_by_need(sizes_bytes, least_bytes))

    @cached_property
    def whole(self) -> tuple[tuple[BucketShards, slice], ...]:
        """The bucket as one part, as :attr:`in_turn`."""
        return ((self, slice(0, sum(self.layout.numels))),)

    @cached_property
    def in_turn(self) -> tuple[tuple[BucketShards, slice], ...]:
        """The bucket in parts that are reduced in turn, each with its place in a flat buffer; those of which nothing is
        sharded are left out. See [Note: what is reduced at once] in :mod:`overlap.optim.zero.gather_parts`."""
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        parts = parts_by_need(sizes_bytes, bytes_at_once(self._shards[0].parameter.device))
        if len(parts) == 1:
            return self.whole
        starts = [0, *itertools.accumulate(self.layout.numels)]
        return tuple(
            (self._part(places), slice(starts[places.start], starts[places.stop]))
            for places in reversed(parts)
            if any(shard is not None for shard in self._by_place[places])
        )

    def _part(self, places: slice) -> BucketShards:
        return BucketShards(self.layout.part(places), self._by_place[places], self.rank)

    def note_written(self) -> None:
        """The gather has written the other ranks' parts."""
        for shard in self._shards:
            if shard.published is not None:
                shard.note_written()


def shards_of_bucket(parameters: Sequence[Tensor], ownerships: Sequence[Ownership]) -> BucketShards | None:
    """The shards of a bucket of these parameters, in any of ``ownerships``; ``None`` if none is sharded."""
    found = tuple(_first(ownership.shards.get(id(parameter)) for ownership in ownerships) for parameter in parameters)
    if all(shard is None for shard in found):
        return None
    layout = Layout(
        ranges=tuple(None if shard is None else shard.ranges for shard in found),
        numels=tuple(parameter.numel() for parameter in parameters),
        is_even=not any(shard is not None and shard.is_whole and shard.parameter.dim() for shard in found),
        segment_multiple=segment_multiple(parameters[0].device),
    )
    return BucketShards(layout, found, ownerships[0].group.rank())


def in_elements(bucket: Bucket) -> Bucket:
    """``bucket`` with a complex buffer if its gradients are complex; DDP's holds pairs of real numbers.

    A shard's elements are those of its parameter.
    """
    if bucket.parameters[0].is_complex() and not bucket.buffer.is_complex():
        return replace(bucket, buffer=torch.view_as_complex(bucket.buffer.view(-1, 2)))
    return bucket


def reduced(bucket: Bucket, shards: BucketShards | None) -> Bucket:
    """``bucket`` after the reduction of ``shards``, as the next stage sees it."""
    return replace(bucket, is_mean=True, owned=None if shards is None else shards.means(bucket.buffer))


def _first(shards: Iterable[Shard | None]) -> Shard | None:
    return next((shard for shard in shards if shard is not None), None)


def _cut(buffer: Tensor, cuts: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Tensor]:
    lengths, chosen = cuts
    return list(map(buffer.split_with_sizes(lengths).__getitem__, chosen))


def beginning(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The beginning of ``flat``, which may be longer, in parts of the lengths of ``pieces``."""
    return beginnings(flat[None], [pieces])


def beginnings(rows: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The :func:`beginning` of each of ``rows``, which are contiguous, one after another."""
    lengths: list[int] = []
    for own in pieces:
        numels = [piece.numel() for piece in own]
        lengths += [*numels, rows.size(1) - sum(numels)]
    ends = set(itertools.accumulate(len(own) + 1 for own in pieces))
    parts = rows.view(-1).split_with_sizes(lengths)
    return [part for place, part in enumerate(parts, start=1) if place not in ends]
