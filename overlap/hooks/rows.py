"""Parameters cut into as many equal parts as there are ranks on a machine.

[Note: one part of every parameter]

Row ``r`` holds part ``r`` of every parameter of a bucket, one after another. A part is ``ceil(numel / rows)`` elements
in the order of memory, and the last ones are filled up with zeros. So which elements of a parameter a rank sends to
other machines does not depend on DDP's buckets, and memory by parameter name stays valid when those are rebuilt; and
all rows are equally long, so that the ranks of a machine issue the same collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.segments import round_up, segment_multiple

__all__ = ["Rows", "part_numel"]


def part_numel(parameter: Tensor, rows: int) -> int:
    """How many real numbers of ``parameter`` are in each of ``rows`` rows."""
    return -(-parameter.numel() * (2 if parameter.is_complex() else 1) // rows)


@dataclass(frozen=True)
class Rows:
    """See [Note: one part of every parameter]."""

    count: int
    extents: tuple[tuple[int, int], ...]
    """Where each parameter begins in the bucket, and its real numbers."""

    @classmethod
    def of(cls, bucket: Bucket, count: int) -> Rows:
        views = bucket.with_buffer(bucket.buffer).views
        assert views is not None, "with_buffer makes them"
        return cls(count, tuple((offset, size.numel()) for size, _, offset in views))

    @property
    def parts(self) -> tuple[int, ...]:
        """The elements of each parameter in a row."""
        return tuple(-(-numel // self.count) for _, numel in self.extents)

    @property
    def numel(self) -> int:
        """The elements of a row, without its padding at the end."""
        return sum(self.parts)

    @property
    def views(self) -> tuple[tuple[torch.Size, tuple[int, ...], int], ...]:
        """The parts of a row as :attr:`Bucket.views`."""
        ends = itertools.accumulate(self.parts)
        return tuple((torch.Size([part]), (1,), end - part) for part, end in zip(self.parts, ends, strict=True))

    def pack(self, flat: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The gradients of a bucket's buffer as rows, shape ``(count, n)``; see [Note: segments]."""
        numel = round_up(self.numel, segment_multiple(flat.device))
        is_full = self.count * numel == sum(numel for _, numel in self.extents)
        rows = (torch.empty if is_full else torch.zeros)((self.count, numel), dtype=dtype, device=flat.device)
        pairs = list(self._pairs(flat, rows))
        copy_all([row for _, row in pairs], [own for own, _ in pairs])
        return rows

    def unpack(self, rows: Tensor, flat: Tensor) -> None:
        """The inverse of :meth:`pack`."""
        pairs = list(self._pairs(flat, rows))
        copy_all([own for own, _ in pairs], [row for _, row in pairs])

    def _pairs(self, flat: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same elements in both."""
        for (start, numel), (_, _, column), part in zip(self.extents, self.views, self.parts, strict=True):
            full, rest = divmod(numel, part) if part else (0, 0)
            if full:
                yield flat[start : start + full * part].view(full, part), rows[:full, column : column + part]
            if rest:
                yield flat[start + full * part : start + numel], rows[full, column : column + rest]
