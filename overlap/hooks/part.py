"""Some parameters of a bucket as a bucket of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.segments import can_be_sent

__all__ = ["Part"]


@dataclass(frozen=True, eq=False)
class Part:
    """A bucket of some parameters of another one.

    Where their gradients lie in one run, it is a view of that run; where they lie in several, or where the run begins
    is no place to send from (see [Note: segments] in :mod:`overlap.hooks.segments`), a copy of them.
    """

    bucket: Bucket
    _runs: tuple[Tensor, ...] | None
    """What was copied; ``None`` where nothing was."""

    @classmethod
    def of(cls, whole: Bucket, places: Sequence[int]) -> Part:
        """The parameters of ``whole`` at ``places``, in ascending order."""
        views = whole.with_buffer(whole.buffer).views
        assert views is not None, "with_buffer makes them"
        starts: list[tuple[int, int]] = []
        own, end = [], 0
        for size, stride, offset in (views[place] for place in places):
            own.append((size, stride, end))
            numel = size.numel()
            if numel and starts and sum(starts[-1]) == offset:
                starts[-1] = (starts[-1][0], starts[-1][1] + numel)
            elif numel:
                starts.append((offset, numel))
            end += numel
        runs = tuple(whole.buffer.narrow(0, start, numel) for start, numel in starts)
        is_copied = len(runs) > 1 or not all(map(can_be_sent, runs))
        bucket = replace(
            whole,
            buffer=torch.cat(runs) if is_copied else runs[0] if runs else whole.buffer[:0],
            parameters=tuple(whole.parameters[place] for place in places),
            fqns=None if whole.fqns is None else tuple(whole.fqns[place] for place in places),
            raw=None,
            views=tuple(own),
        )
        return cls(bucket, runs if is_copied else None)

    def put_back(self) -> None:
        """Copy what the bucket holds to where it was taken from, unless it is there."""
        if self._runs is not None:
            copy_all(self._runs, self.bucket.buffer.split([run.numel() for run in self._runs]))
