"""The part of every parameter, and of the parameters in a bucket, that each rank owns, as tensors.

[Note: versions of sharded parameters]

Updates and gathers write parameters through views of ``parameter.data``, whose version counters are their own: some
writes come from the network, some while the next forward runs. So the version of a parameter is raised explicitly and
once, when its update is made. A weight that a later node of this backward still needs is then autograd's error, and
between backward and ``step()`` a version changes only where the training loop writes.

[Note: parts of a gather]

A bucket of 25 MB takes a fifth of a second on a link of 1 Gbit/s, for which a forward would wait for its first layer.
So a gather during the next forward is cut between parameters, the bucket's last ones first, which the forward needs
first, into parts that are large next to the cost of a message. Whole parameters are not parted, since one rank would
send each part and the links of the others rest; nor is a message of a wire, whose blocks cross parameters. Parts depend
on the sizes of the parameters alone, so they are the same on every rank.

[Note: reduced in turn]

A collective needs a packed copy of the bucket. DDP's first pass has one bucket of the whole model, and that copy would
be the largest of the run. So a single large bucket is reduced in parts, one after another; where other buckets follow,
the link would rest between parts. On Gloo see [Note: rows of a sum] in :mod:`overlap._torch.c10d`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap.errors import TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket
from overlap.hooks.segments import round_up, segment_multiple
from overlap.optim.zero.partition import Range

__all__ = [
    "BucketShards",
    "Shard",
    "beginning",
    "beginnings",
    "flatten",
    "in_elements",
    "is_narrower",
    "parts_by_need",
    "reduced",
    "shards_of_bucket",
]

_LEAST_BYTES = 2**20
# Networks of accelerators are a hundred times as fast, and a launch of theirs takes as long as a message of a CPU.
_LEAST_BYTES_ON_STREAMS = 2**24
# Of DDP's buckets by default; on accelerators they are often given more.
_AT_ONCE_BYTES = 25 * 2**20
_AT_ONCE_BYTES_ON_STREAMS = 2**28


class Shard:
    """One parameter, flat in the order of its memory, and the part of it that this rank's optimizer steps.

    ``own`` is a view of the parameter, so stepping it changes the parameter and costs no memory. With a wider
    ``master_dtype``, or after :meth:`keep_true`, it is a copy, which :meth:`publish` rounds into the parameter. It is
    ``None`` if the optimizer sees whole tensors and another rank owns this one.
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
        """The dtype in which the optimizer steps."""
        self.published: Tensor | None = None
        """With :meth:`keep_true`: this rank's part as the last gather wrote it."""
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

    @property
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

    def refresh(self) -> None:
        """Follow a parameter that was moved to other memory, or changed by other code; called without gradients.

        Raises:
            TrainingLoopError: its elements are in another order than the state.
        """
        if self.parameter.stride() != self.strides:
            raise TrainingLoopError(
                f"{self.name} has strides {self.parameter.stride()}, but had {self.strides}: after "
                "model.to(memory_format=...) remove() the registration, build DistributedDataParallel anew and "
                "register again, which brings the optimizer's state into the new order"
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
        before = self.own.to(self.parameter.dtype) if self.published is None else self.published
        view = self.shaped(self.views[self.rank])
        if has_streams(view.device) or not torch.equal(view, before):
            # By `.data`, since a copy made by keep_true() counts versions with the parameter, which backward may need.
            self.own.data.copy_(torch.where(view == before, self.own, view.to(self.own.dtype)))
            self.note_written()

    @torch.no_grad()
    def keep_true(self) -> None:
        """From now on let the optimizer step a copy that the parameter need not equal, and keep a second one of the
        parameter's values, so that a change by other code is seen."""
        if self.own is None or self.published is not None:
            return
        if self.has_master:
            self.refresh()
        else:
            self.own.data = self.own.detach().clone()
            self.has_master = True
        self.published = self.shaped(self.views[self.rank]).clone()

    def write_difference(self, out: Tensor) -> None:
        """Write the difference of master and parameter to ``out``, flat and in fp32."""
        assert self.own is not None, "asked of a part that this rank owns"
        wide = torch.promote_types(self.own.dtype, torch.float32)
        self.shaped(out).copy_(self.own.to(wide) - self.shaped(self.views[self.rank]))

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

    def publish(self) -> None:
        """Round the master, if there is one, into the parameter."""
        if self.has_master and self.own is not None:
            self.shaped(self.views[self.rank]).copy_(self.own)

    def note_written(self) -> None:
        """The parameter's memory was written, and that is no change by other code."""
        if self.published is not None:
            self.published.copy_(self.shaped(self.views[self.rank]))


class BucketShards:
    """Cuts the buffers of a bucket into the pieces that each rank owns.

    *Flat* is a buffer of parameter after parameter, as DDP's bucket. *Packed* is one of rank after rank, of sharded
    parameters alone: a rank's pieces are one segment that a collective can send, of one length if parameters are cut.

    Args:
        shards: of each parameter of the bucket; ``None`` of one that is not sharded.
        numels: of each parameter.
        rank: this one.
        segment_multiple: of the length of a segment; see [Note: segments] in :mod:`overlap.hooks.segments`.
    """

    def __init__(self, shards: Sequence[Shard | None], numels: Sequence[int], rank: int, segment_multiple: int) -> None:
        self._by_place, self._numels, self._multiple = shards, numels, segment_multiple
        self._starts = [0, *itertools.accumulate(numels)]
        self.rank = rank
        self._shards = [shard for shard in shards if shard is not None]
        self.is_even = not any(shard.is_whole and shard.parameter.dim() for shard in self._shards)
        """Whether ranks send as much as each other in a gather, and so a collective can."""
        self.ranks = range(len(self._shards[0].ranges))
        self.of_rank: list[slice] = []
        """Where the pieces of each rank are among all, in packed order."""
        self.parameter_pieces: list[Tensor] = []
        """The parameters' own memory, in packed order."""
        self.owned_numels: list[int] = []
        """How many elements each rank owns."""
        # Where the pieces are in a flat buffer.
        self._flat_slices: list[slice] = []
        for owner in self.ranks:
            first = len(self.parameter_pieces)
            for place, shard in enumerate(shards):
                if shard is not None and shard.ranges[owner][0] < shard.ranges[owner][1]:
                    self.parameter_pieces.append(shard.views[owner])
                    self._flat_slices.append(self._slice(place, owner))
            self.of_rank.append(slice(first, len(self.parameter_pieces)))
            self.owned_numels.append(sum(piece.numel() for piece in self.parameter_pieces[first:]))
        self.gathered_numels = [max(self.owned_numels)] * len(self.ranks) if self.is_even else self.owned_numels
        """How many elements each rank sends in a gather."""
        segments = [round_up(numel, segment_multiple if self.is_even else 1) for numel in self.gathered_numels]
        self.packed_numel = sum(segments)
        start = sum(segments[:rank])
        self.segment = slice(start, start + segments[rank])
        """Where the segment of this rank is in a packed buffer."""
        self._packed_slices: list[slice] = []
        for own, start in zip(self.of_rank, itertools.accumulate(segments, initial=0), strict=False):
            for piece in self.parameter_pieces[own]:
                self._packed_slices.append(slice(start, start := start + piece.numel()))
        self.owned = [shard for shard in self._shards if shard.own is not None]
        """The shards that this rank's optimizer has a part of, which may be empty."""
        self.are_sharded = [shard is not None for shard in shards]
        """For each parameter of the bucket, whether it is sharded."""
        # Where in a flat buffer this rank's parts, and parameters that are not sharded, are.
        places = range(len(shards))
        self._own_slices = [self._slice(place, rank) for place in places if (s := shards[place]) and s.own is not None]
        self._rest_slices = [slice(*self._starts[place : place + 2]) for place in places if shards[place] is None]

    def _slice(self, place: int, owner: int) -> slice:
        """Where the part of a parameter that a rank owns is in a flat buffer; empty if it is not sharded."""
        start, shard = self._starts[place], self._by_place[place]
        return slice(start, start) if shard is None else slice(*(start + each for each in shard.ranges[owner]))

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    @property
    def owning(self) -> list[Shard]:
        """The shards of the pieces that this rank owns, in packed order."""
        return [shard for shard in self._shards if shard.range[0] < shard.range[1]]

    def own_of(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of ``pieces``, in packed order, that this rank owns."""
        return pieces[self.of_rank[self.rank]]

    def others_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``pieces`` that other ranks own."""
        own = self.of_rank[self.rank]
        return [*pieces[: own.start], *pieces[own.stop :]]

    def cut_packed(self, packed: Tensor) -> list[Tensor]:
        """The pieces of a packed buffer."""
        return list(map(packed.__getitem__, self._packed_slices))

    def cut_flat(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a flat buffer, in packed order."""
        return list(map(flat.__getitem__, self._flat_slices))

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        return list(map(flat.__getitem__, self._rest_slices))

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`owned` in a flat buffer of gradients, empty parts included."""
        return list(map(flat.__getitem__, self._own_slices))

    def means(self, flat: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of each parameter in ``flat``, where it has the mean; ``None`` of one that is not
        sharded."""
        # DDP's buffer holds a complex gradient as pairs of real numbers.
        width = 2 if self._shards[0].parameter.is_complex() and not flat.is_complex() else 1
        slices = [self._slice(place, self.rank) for place in range(len(self._numels))]
        return tuple(
            flat[width * own.start : width * own.stop] if is_sharded else None
            for own, is_sharded in zip(slices, self.are_sharded, strict=True)
        )

    @cached_property
    def parts(self) -> list[BucketShards]:
        """The bucket in parts, the last parameters first. See [Note: parts of a gather]."""
        on_streams = has_streams(self._shards[0].parameter.device)
        return [part for part, _ in self._cut(_LEAST_BYTES_ON_STREAMS if on_streams else _LEAST_BYTES, self.is_even)]

    @cached_property
    def in_turn(self) -> list[tuple[BucketShards, slice]]:
        """The bucket in parts with their places in a flat buffer. See [Note: reduced in turn]."""
        on_streams = has_streams(self._shards[0].parameter.device)
        return self._cut(_AT_ONCE_BYTES_ON_STREAMS if on_streams else _AT_ONCE_BYTES)

    def _cut(self, least_bytes: int, may_cut: bool = True) -> list[tuple[BucketShards, slice]]:
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        places = parts_by_need(sizes_bytes, least_bytes)
        if len(places) == 1 or not may_cut:
            return [(self, slice(None))]
        return [
            (
                BucketShards(self._by_place[some], self._numels[some], self.rank, self._multiple),
                slice(self._starts[some.start], self._starts[some.stop]),
            )
            for some in places
        ]

    def note_written(self) -> None:
        """The gather has written the other ranks' parts."""
        for shard in self._shards:
            if shard.published is not None:
                shard.note_written()


def shards_of_bucket(parameters: Sequence[Tensor], *known: Mapping[int, Shard]) -> BucketShards | None:
    """The shards of a bucket of these parameters, by ``id`` in any of ``known``; ``None`` if none is sharded."""
    found = [next((each[id(p)] for each in known if id(p) in each), None) for p in parameters]
    ranks = [shard.rank for shard in found if shard is not None]
    if not ranks:
        return None
    numels = [parameter.numel() for parameter in parameters]
    return BucketShards(found, numels, ranks[0], segment_multiple(parameters[0].device))


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


def is_narrower(parameter: Tensor, master_dtype: torch.dtype | None) -> bool:
    """Whether a parameter gets a master in ``master_dtype``."""
    dtype = parameter.dtype
    return master_dtype is not None and dtype.is_floating_point and master_dtype.itemsize > dtype.itemsize


def flatten(tensor: Tensor) -> Tensor:
    """A flat view of ``tensor``, whose memory has no gaps, in the order of its memory."""
    detached = tensor.detach()
    return detached.as_strided((tensor.numel(),), (1,), int(detached.storage_offset()))


def beginning(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The beginning of ``flat``, which may be longer, in parts of the lengths of ``pieces``."""
    numels = [piece.numel() for piece in pieces]
    return flat.split_with_sizes([*numels, flat.numel() - sum(numels)])[:-1]


def beginnings(rows: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The :func:`beginning` of each of ``rows``, which are contiguous, one after another."""
    lengths: list[int] = []
    for own in pieces:
        numels = [piece.numel() for piece in own]
        lengths += [*numels, rows.size(1) - sum(numels)]
    ends = set(itertools.accumulate(len(own) + 1 for own in pieces))
    parts = rows.view(-1).split_with_sizes(lengths)
    return [part for place, part in enumerate(parts, start=1) if place not in ends]


def parts_by_need(sizes_bytes: Sequence[int], least_bytes: int) -> list[slice]:
    """The parts of a bucket whose parameters have these sizes, the last ones first, each as small as it can be with at
    least ``least_bytes``.

    >>> parts_by_need([10, 1, 1, 30, 2, 2], least_bytes=4)
    [slice(4, 6, None), slice(3, 4, None), slice(0, 3, None)]
    """
    parts: list[slice] = []
    end, part_bytes = len(sizes_bytes), 0
    for place in reversed(range(len(sizes_bytes))):
        part_bytes += sizes_bytes[place]
        if part_bytes >= least_bytes:
            parts.append(slice(place, end))
            end, part_bytes = place, 0
    if end:
        last = parts.pop() if parts else slice(0, end)
        parts.append(slice(0, last.stop))
    return parts
