"""Which rank owns which elements.

[Note: ownership]

A parameter is cut into one range of elements per rank, in the order of its memory. Ranges depend only on the sizes of
the parameters and on the number of ranks, never on DDP's buckets, which can be rebuilt.

By *element*, every rank owns an equal part of every parameter. Ranges start at multiples of 128 bytes: CPU kernels take
two vectors of at most 64 bytes at a time, and the rest at the end of a tensor one element at a time, which rounds
differently in 16-bit types. So each element is treated as it would be in the whole tensor, and results equal those of
the plain optimizer bit for bit (with one thread: several cut a long tensor anywhere). The rest goes to the ranks that
own least so far. By *parameter*, one rank owns all of a parameter; the largest are given first, each to the rank that
owns least so far. Frozen parameters have no state, so they are balanced by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Extent", "Partition", "Range", "copy_options", "options_of"]

_BLOCK_BYTES = 128
# The keys of a group that are not hyperparameters.
_NOT_OPTIONS = ("params", "param_names")

Range = tuple[int, int]


class Extent(NamedTuple):
    """The size of a parameter."""

    numel: int
    itemsize: int
    """Bytes per element."""
    pool: Hashable = None
    """Parameters of one pool are balanced among themselves: their state has the same size per element."""


class Partition:
    """Assigns elements to ``ranks`` by ``unit``, ``"element"`` or ``"parameter"``. See [Note: ownership]."""

    def __init__(self, unit: str, ranks: int) -> None:
        self.is_whole = unit == "parameter"
        """Whether a parameter is never cut."""
        self._ranks = range(ranks)
        # Bytes that each rank owns, by pool.
        self._owned: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0] * ranks)

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        """One range per rank for each parameter."""
        places = range(len(extents))
        if not self.is_whole:
            return [self._cut(extents[place]) for place in places]
        largest_first = sorted(places, key=lambda place: -extents[place].numel * extents[place].itemsize)
        ranges = {place: self._give(extents[place]) for place in largest_first}
        return [ranges[place] for place in places]

    def _give(self, extent: Extent) -> tuple[Range, ...]:
        owned = self._owned[extent.pool]
        owner = min(self._ranks, key=lambda rank: (owned[rank], rank))
        owned[owner] += extent.numel * extent.itemsize
        return tuple((0, extent.numel) if rank == owner else (0, 0) for rank in self._ranks)

    def _cut(self, extent: Extent) -> tuple[Range, ...]:
        numel, block_numel = extent.numel, max(1, _BLOCK_BYTES // extent.itemsize)
        blocks = -(-numel // block_numel)
        owned = self._owned[extent.pool]
        each, extra = divmod(blocks, len(self._ranks))
        ranges: list[Range] = [(numel, numel)] * len(self._ranks)
        start, given = 0, 0
        # The ranks that own least come first, where the larger ranges are.
        for place, rank in enumerate(sorted(self._ranks, key=lambda rank: (owned[rank], rank))):
            given += each + (place < extra)
            end = numel if given == blocks else given * block_numel
            ranges[rank] = (start, end)
            owned[rank] += (end - start) * extent.itemsize
            start = end
        return tuple(ranges)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group to its counterpart."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))
