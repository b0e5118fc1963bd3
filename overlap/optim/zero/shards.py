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
send each part and the links of the others rest. Parts depend on the sizes of the parameters alone, so they are the same
on every rank.

[Note: reduced in turn]

A collective needs a packed copy of the bucket. DDP's first pass has one bucket of the whole model, and that copy would
be the largest of the run. So a single large bucket is reduced in parts, one after another; where other buckets follow,
the link would rest between parts. On Gloo see [Note: rows of a sum] in :mod:`overlap._torch.c10d`. Gathers without a
stage, which know no buckets, have the same parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.errors import TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket
from overlap.hooks.segments import round_up, segment_multiple
from overlap.optim.zero.partition import Range

__all__ = [
    "BucketShards",
    "Shard",
    "flatten",
    "in_elements",
    "parts_by_need",
    "publish",
    "reduced",
    "shards_of_bucket",
]

# A message costs tens of microseconds, in which about 256 KB can be copied.
_LARGE_NUMEL = 64 * 1024
# Of what all other ranks send; two rows are in memory at a time. See [Note: rows of a sum] in overlap._torch.c10d.
_ROW_BYTES = 2**19
_LEAST_BYTES = 2**20
# Networks of accelerators are a hundred times as fast, and a launch of theirs takes as long as a message of a CPU.
_LEAST_BYTES_ON_STREAMS = 2**26
# Of DDP's buckets by default; on accelerators they are often given more.
_AT_ONCE_BYTES = 25 * 2**20
_AT_ONCE_BYTES_ON_STREAMS = 2**28


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


class BucketShards:
    """Cuts the buffers of a bucket into the pieces that each rank owns.

    *Flat* is a buffer of parameter after parameter, as DDP's bucket. *Packed* is one of rank after rank, of sharded
    parameters alone: a rank's pieces are one segment, of one length if a collective can send it.

    Args:
        shards: of each parameter of the bucket; ``None`` of one that is not sharded.
        numels: of each parameter.
        rank: this one.
        packs_all: whether all pieces are in the packed buffer; if not, large ones travel by themselves.
    """

    def __init__(
        self, shards: Sequence[Shard | None], numels: Sequence[int], rank: int, *, packs_all: bool = True
    ) -> None:
        self._by_place, self._numels, self._packs_all = shards, numels, packs_all
        self.rank = rank
        self._shards = [shard for shard in shards if shard is not None]
        self.like = self._shards[0].parameter
        """One of the parameters."""
        self.ranks = range(len(self._shards[0].ranges))
        self.peers = [other for other in self.ranks if other != rank]
        self.are_sharded = [shard is not None for shard in shards]
        """For each parameter of the bucket, whether it is sharded."""
        self.owned = [shard for shard in self._shards if shard.own is not None]
        """The shards that this rank's optimizer has a part of, which may be empty."""
        self.is_even = packs_all and not any(shard.is_whole and shard.parameter.dim() for shard in self._shards)
        """Whether the segments are of one length, so that a collective can send them."""
        # Where this rank's part of each parameter is in a flat buffer, and parameters that are not sharded.
        self._own_slices: list[slice | None] = []
        self._rest_slices: list[slice] = []
        # The pieces of a flat buffer in its order, and those of each rank that are packed, by their place among these.
        self._piece_numels: list[int] = []
        small: list[list[int]] = [[] for _ in self.ranks]
        large: list[list[slice]] = [[] for _ in self.ranks]
        memory: dict[int, Tensor] = {}
        self.large_parameters: list[list[Tensor]] = [[] for _ in self.ranks]
        """The parameters' own memory, of the pieces of each rank that are not packed."""
        for shard, start, numel in zip(shards, itertools.accumulate(numels, initial=0), numels, strict=False):
            if shard is None:
                self._own_slices.append(None)
                self._rest_slices.append(slice(start, start + numel))
                self._piece_numels.append(numel)
                continue
            self._own_slices.append(slice(start + shard.range[0], start + shard.range[1]))
            for owner in sorted(self.ranks, key=shard.ranges.__getitem__):
                first, last = shard.ranges[owner]
                if last - first >= _LARGE_NUMEL and not packs_all:
                    large[owner].append(slice(start + first, start + last))
                    self.large_parameters[owner].append(shard.views[owner])
                elif first < last:
                    small[owner].append(len(self._piece_numels))
                    memory[len(self._piece_numels)] = shard.views[owner]
                if first < last:
                    self._piece_numels.append(last - first)
        pairs = zip(self._own_slices, shards, strict=True)
        self._owned_slices = [own for own, shard in pairs if own and shard and shard.own is not None]
        self.numel = sum(shard.parameter.numel() for shard in self._shards)
        """How many elements the sharded parameters have."""
        self._packed = [place for places in small for place in places]
        self.parameter_pieces = [memory[place] for place in self._packed]
        """The parameters' own memory, in packed order."""
        packed_numels = [sum(self._piece_numels[place] for place in places) for places in small]
        multiple = segment_multiple(self.like.device)  # See [Note: segments] in :mod:`overlap.hooks.segments`.
        self.segment_numels = [round_up(max(packed_numels) if self.is_even else n, multiple) for n in packed_numels]
        """The length of each rank's segment in a packed buffer."""
        self.packed_numel = sum(self.segment_numels)
        starts = itertools.accumulate(self.segment_numels, initial=0)
        self.segments = [slice(*ends) for ends in itertools.pairwise(starts)]
        """Where each rank's segment is."""
        # Without what is empty at its end.
        self._filled = [slice(s.start, s.start + n) for s, n in zip(self.segments, packed_numels, strict=True)]
        firsts = [0, *itertools.accumulate(map(len, small))]
        self.own_packed = slice(firsts[rank], firsts[rank + 1])
        """Where this rank's pieces are among those that are packed."""
        # A packed buffer with what is empty at the ends of segments, and where the pieces are among these parts.
        self._part_numels: list[int] = []
        self._parts: list[int] = []
        for places, numel, segment_numel in zip(small, packed_numels, self.segment_numels, strict=True):
            self._parts += range(len(self._part_numels), len(self._part_numels) + len(places))
            self._part_numels += [*(self._piece_numels[place] for place in places), segment_numel - numel]
        row_numel = max(1, self.packed_numel)
        if not has_streams(self.like.device):
            row_numel = max(_LARGE_NUMEL, _ROW_BYTES // max(1, len(self.peers)) // self.like.element_size())
        self._large_rows = [[row for one in own for row in _rows(one, row_numel)] for own in large]
        self._packed_rows = [_rows(filled, row_numel) for filled in self._filled]

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    def packed_of(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a flat buffer that are packed, in packed order."""
        return list(map(flat.split_with_sizes(self._piece_numels).__getitem__, self._packed))

    def cut_packed(self, packed: Tensor) -> list[Tensor]:
        """The pieces of a packed buffer."""
        return list(map(packed.split_with_sizes(self._part_numels).__getitem__, self._parts))

    def new_parameters(self, owner: int, packed: Tensor) -> list[Tensor]:
        """What ``owner`` sends in a gather, from and to the parameters' own memory where it is not packed."""
        small = packed[self._filled[owner]]
        return [*self.large_parameters[owner], *([small] if small.numel() else [])]

    def messages(self, owner: int, flat: Tensor, packed: Tensor) -> list[Tensor]:
        """What is sent to ``owner`` in a sum. See [Note: rows of a sum] in :mod:`overlap._torch.c10d`."""
        large = map(flat.__getitem__, self._large_rows[owner])
        return [*large, *map(packed.__getitem__, self._packed_rows[owner])]

    def others_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``pieces``, in packed order, that other ranks own."""
        return [*pieces[: self.own_packed.start], *pieces[self.own_packed.stop :]]

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        return list(map(flat.__getitem__, self._rest_slices))

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`owned` in a flat buffer of gradients, empty parts included."""
        return list(map(flat.__getitem__, self._owned_slices))

    def means(self, flat: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of each parameter in ``flat``, where it has the mean; ``None`` of one that is not
        sharded."""
        return tuple([None if own is None else flat[own] for own in self._own_slices])

    @cached_property
    def parts(self) -> list[BucketShards]:
        """The bucket in parts, the last parameters first. See [Note: parts of a gather]."""
        on_streams = has_streams(self.like.device)
        may_cut = not any(shard.is_whole and shard.parameter.dim() for shard in self._shards)
        return [part for part, _ in self._cut(_LEAST_BYTES_ON_STREAMS if on_streams else _LEAST_BYTES, may_cut)]

    @cached_property
    def in_turn(self) -> list[tuple[BucketShards, slice]]:
        """The bucket in parts with their places in a flat buffer. See [Note: reduced in turn]."""
        on_streams = has_streams(self.like.device)
        return self._cut(_AT_ONCE_BYTES_ON_STREAMS if on_streams else _AT_ONCE_BYTES)

    def _cut(self, least_bytes: int, may_cut: bool = True) -> list[tuple[BucketShards, slice]]:
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        places = parts_by_need(sizes_bytes, least_bytes)
        if len(places) == 1 or not may_cut:
            return [(self, slice(None))]
        starts = [0, *itertools.accumulate(self._numels)]
        return [
            (
                BucketShards(self._by_place[some], self._numels[some], self.rank, packs_all=self._packs_all),
                slice(starts[some.start], starts[some.stop]),
            )
            for some in places
        ]


def _rows(of: slice, row_numel: int) -> list[slice]:
    """``of`` in rows of at most so many elements."""
    return [slice(start, min(of.stop, start + row_numel)) for start in range(of.start, of.stop, row_numel)]


def shards_of_bucket(
    parameters: Sequence[Tensor], *known: Mapping[int, Shard], packs_all: bool = True
) -> BucketShards | None:
    """The shards of a bucket of these parameters, by ``id`` in any of ``known``; ``None`` if none is sharded."""
    found = [next((each[id(p)] for each in known if id(p) in each), None) for p in parameters]
    ranks = [shard.rank for shard in found if shard is not None]
    if not ranks:
        return None
    return BucketShards(found, [parameter.numel() for parameter in parameters], ranks[0], packs_all=packs_all)


def in_elements(bucket: Bucket) -> Bucket:
    """``bucket`` with a complex buffer if its gradients are complex; DDP's holds pairs of real numbers.

    A shard's elements are those of its parameter.
    """
    if bucket.parameters[0].is_complex() and not bucket.buffer.is_complex():
        return replace(bucket, buffer=torch.view_as_complex(bucket.buffer.view(-1, 2)))
    return bucket


def reduced(bucket: Bucket, shards: BucketShards | None) -> Bucket:
    """``bucket`` after the reduction of ``shards``, as the next stage sees it."""
    if shards is None:
        return replace(bucket, is_mean=True, owned=None)
    owned = shards.means(in_elements(bucket).buffer)
    if not bucket.buffer.is_complex():
        owned = tuple([torch.view_as_real(p).view(-1) if p is not None and p.is_complex() else p for p in owned])
    return replace(bucket, is_mean=True, owned=owned)


def publish(shards: Sequence[Shard]) -> None:
    """Round masters into their parameters."""
    masters = [(shard, own) for shard in shards if (own := shard.own) is not None]
    copy_all([shard.shaped(shard.views[shard.rank]) for shard, _ in masters], [own for _, own in masters])


def flatten(tensor: Tensor) -> Tensor:
    """A flat view of ``tensor``, whose memory has no gaps, in the order of its memory."""
    detached = tensor.detach()
    return detached.as_strided((tensor.numel(),), (1,), int(detached.storage_offset()))


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
