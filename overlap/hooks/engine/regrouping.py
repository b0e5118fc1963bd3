"""Runs one pass in other buckets than DDP's. See [Note: buckets after a resume] in :mod:`overlap.hooks.cut`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, whole_pass
from overlap.hooks.cut import BucketCut, Buckets
from overlap.hooks.engine.executors import Executor
from overlap.hooks.engine.task import Task
from overlap.hooks.engine.wavefront import Wavefront

__all__ = ["Regrouping"]

Parts = Callable[[Bucket], Iterator[tuple[str, Coroutine[Operation, Any, None]]]]
"""The label and the coroutine of each stage for a bucket, in order."""


@dataclass(eq=False)
class Regrouping:
    """Runs the stages of one pass, from the reducer on, on the buckets ``wanted``, in the order of an ordinary pass.

    Needs a copy of the gradients of the buckets that are under way.
    """

    wanted: Buckets
    cut: BucketCut
    executor: Executor
    _arrived: list[Bucket] = field(default_factory=list)
    _is_cut_anew: bool = False

    def used(self, own: Buckets) -> Buckets:
        """The buckets that the pass was reduced in, where DDP's were ``own``."""
        return self.wanted if self._is_cut_anew else own

    async def run(self, bucket: Bucket, parts: Parts) -> None:
        """Called for each of DDP's buckets; the first to go on when all have come runs ``parts`` on all."""
        self._arrived.append(bucket)
        await whole_pass()
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._run_all(arrived, parts)

    def _run_all(self, arrived: list[Bucket], parts: Parts) -> None:
        homes = self._homes(arrived)
        self._is_cut_anew = homes is not None
        buckets = iter(arrived) if homes is None else self._cut_anew(arrived[0], homes)
        wavefront = Wavefront()
        try:
            for bucket in buckets:
                back = _Back(bucket, homes, self.cut.keys_of(bucket))
                task = Task(bucket, parts(bucket), self.executor, back)
                wavefront.arrive(task, is_last=bucket.is_last)
        except BaseException:
            for task in wavefront.active:
                task.close()
            raise

    def _homes(self, arrived: Sequence[Bucket]) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Each parameter with its gradient in DDP's bucket; ``None`` where they cannot be cut as ``wanted``."""
        homes = {
            key: pair
            for bucket in arrived
            for key, pair in zip(
                self.cut.keys_of(bucket), zip(bucket.parameters, bucket.gradients, strict=True), strict=True
            )
        }
        if sorted(homes) != sorted(key for keys in self.wanted for key in keys):
            return None
        if any(gradient.is_sparse or gradient.is_complex() for _, gradient in homes.values()):
            return None
        kinds = [{(homes[key][1].dtype, homes[key][1].device) for key in keys} for keys in self.wanted]
        return homes if all(len(kind) == 1 for kind in kinds) else None

    def _cut_anew(self, like: Bucket, homes: dict[str, tuple[Tensor, Tensor]]) -> Iterator[Bucket]:
        for index, keys in enumerate(self.wanted):
            gradients = [homes[key][1] for key in keys]
            views, offset = [], 0
            for gradient in gradients:
                views.append((gradient.size(), gradient.stride(), offset))
                offset += gradient.numel()
            first = gradients[0]
            bucket = replace(
                like,
                index=index,
                is_last=index == len(self.wanted) - 1,
                buffer=torch.empty(offset, dtype=first.dtype, device=first.device),
                parameters=tuple(homes[key][0] for key in keys),
                raw=None,
                fqns=None if like.fqns is None else keys,
                views=tuple(views),
            )
            for view, gradient in zip(bucket.gradients, gradients, strict=True):
                view.copy_(gradient)
            yield bucket


@dataclass(frozen=True)
class _Back:
    """Copies a reduced bucket into DDP's."""

    bucket: Bucket
    homes: dict[str, tuple[Tensor, Tensor]] | None
    keys: tuple[str, ...]

    def __call__(self) -> None:
        if self.homes is None:
            return
        for key, gradient in zip(self.keys, self.bucket.gradients, strict=True):
            self.homes[key][1].copy_(gradient)
