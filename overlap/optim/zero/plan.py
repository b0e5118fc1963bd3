"""The shards of one bucket, and the buffers in which they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from overlap.optim.zero.partition import Layout
from overlap.optim.zero.shards import Shard

__all__ = ["Plan", "Workspace", "make_plan"]


class Plan:
    """Cuts a bucket's tensors up by the shards in it."""

    def __init__(self, layout: Layout, shards: tuple[Shard | None, ...], rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.shards = tuple(shard for shard in shards if shard is not None)
        """Those that are sharded, in the bucket's order."""
        self.segment = layout.segment(rank)
        self._slice = layout.of_rank(rank)
        self._by_place = shards

    @cached_property
    def owned(self) -> tuple[Shard, ...]:
        """The shards of which this rank has a part in its optimizer, an empty one too."""
        return tuple(shard for shard in self.shards if shard.own is not None)

    @cached_property
    def parameter_pieces(self) -> list[Tensor]:
        """The parameters' own memory, in packed order."""
        found = [self._by_place[piece.place] for piece in self.layout.pieces]
        return [shard.views[p.rank] for shard, p in zip(found, self.layout.pieces, strict=True) if shard is not None]

    def own_of(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of ``pieces``, in packed order, that this rank owns."""
        return pieces[self._slice]

    def others_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Those that other ranks own."""
        return [*pieces[: self._slice.start], *pieces[self._slice.stop :]]

    def by_rank(self, pieces: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """``pieces``, in packed order, of each rank."""
        return [pieces[self.layout.of_rank(rank)] for rank in range(self.layout.ranks)]

    def cut_packed(self, packed: Tensor) -> list[Tensor]:
        """The pieces of a packed buffer."""
        return _cut(packed, self.layout.packed_cuts)

    def cut_flat(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a flat buffer, in packed order."""
        return _cut(flat, self.layout.flat_cuts)

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`owned` in a flat buffer of gradients, empty parts included."""
        parts: list[Tensor] = []
        offset = 0
        for shard, numel in zip(self._by_place, self.layout.numels, strict=True):
            if shard is not None and shard.own is not None:
                start, end = shard.range
                parts.append(flat[offset + start : offset + end])
            offset += numel
        return parts

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        lengths, chosen = self.layout.flat_cuts
        taken = set(chosen)
        return [part for place, part in enumerate(flat.split_with_sizes(lengths)) if place not in taken]

    def note_written(self) -> None:
        """The gather has written the other ranks' parts."""
        for shard in self.shards:
            shard.note_written()


def make_plan(parameters: Sequence[Tensor], shards: Mapping[int, Shard], *, rank: int, is_even: bool) -> Plan | None:
    """The plan of a bucket of these parameters, given the shards by ``id``; ``None`` where none is sharded."""
    found = tuple(shards.get(id(parameter)) for parameter in parameters)
    if all(shard is None for shard in found):
        return None
    layout = Layout(
        ranges=tuple(None if shard is None else shard.ranges for shard in found),
        numels=tuple(parameter.numel() for parameter in parameters),
        is_even=is_even,
    )
    return Plan(layout, found, rank)


def _cut(buffer: Tensor, cuts: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Tensor]:
    lengths, chosen = cuts
    parts = buffer.split_with_sizes(lengths)
    return [parts[place] for place in chosen]


class Workspace:
    """Flat buffers, kept from bucket to bucket and step to step.

    On the CPU fresh memory is paid for page by page at its first use, which takes longer than what is copied into it.
    Accelerators have a caching allocator, which also knows about streams.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of ``numel`` elements, of ``like``'s dtype and device, holding anything."""
        if like.device.type != "cpu":
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        same = sorted((kept for kept in self._free if kept.dtype == like.dtype), key=Tensor.numel)
        whole = next((kept for kept in same if kept.numel() >= numel), None)
        # A larger one replaces one that is too small, so that there are never more than were in use at once.
        spent = whole if whole is not None else (same[-1] if same else None)
        self._free = [kept for kept in self._free if kept is not spent]
        if whole is None:
            whole = torch.empty(numel, dtype=like.dtype, device=like.device)
        part = whole[:numel]
        self._lent[id(part)] = (part, whole)
        return part

    def give(self, part: Tensor) -> None:
        """Take back what :meth:`take` gave."""
        if part.device.type == "cpu":
            self._free.append(self._lent.pop(id(part))[1])

    def trim(self) -> None:
        """Let go of what is not lent: the buckets to come are others."""
        self._free.clear()

    def forget(self) -> None:
        """Let go of everything, what was lent to work that failed included."""
        self._free.clear()
        self._lent.clear()

    @property
    def held_bytes(self) -> int:
        """What is kept for the next bucket."""
        return sum(kept.nbytes for kept in self._free)
