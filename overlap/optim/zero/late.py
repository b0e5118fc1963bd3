"""Updating after backward: clipping over chunks, loss scaling, and the loop without a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import norms, scale_
from overlap.hooks.engine.background import Item, run_on_group
from overlap.join.active import active_join
from overlap.optim.clipping import Clipping
from overlap.optim.zero.exchange import Exchange
from overlap.optim.zero.joining import lend_gradients
from overlap.optim.zero.plan import Plan, make_plan
from overlap.optim.zero.shards import Shard

if TYPE_CHECKING:
    from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["Alone", "Scaling", "ShardedNorm"]

# As DDP's buckets.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Scaling:
    """What ``GradScaler`` tells an optimizer: whether a gradient is not finite, and the scale of the loss."""

    found_inf: Tensor | None
    scale: Tensor | None

    @property
    def is_used(self) -> bool:
        return self.found_inf is not None

    def forbids_step(self) -> bool:
        """Whether the step is to be skipped; the host waits for the verdict."""
        return self.found_inf is not None and bool(self.found_inf.item())

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, where ``GradScaler.unscale_`` has not."""
        if self.scale is not None and gradients:
            scale_(gradients, self.scale.double().reciprocal().float())


class ShardedNorm:
    """The global norm of gradients of which each rank has a part: local powers, one sum over ranks, one root."""

    def __init__(self, clipping: Clipping, gradients: Sequence[Tensor], device: torch.device) -> None:
        self._clipping = clipping
        # An empty part has no maximum.
        self._gradients = [gradient for gradient in gradients if gradient.numel()]
        self._is_max = clipping.norm_type == float("inf")
        each = [norm.double() for norm in norms(self._gradients, clipping.norm_type)] if self._gradients else []
        stacked = torch.stack(each) if each else torch.zeros(1, dtype=torch.float64, device=device)
        self.partial = stacked.max() if self._is_max else stacked.pow(clipping.norm_type).sum()
        """This rank's part, to be reduced in place with :attr:`op`."""

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.MAX if self._is_max else dist.ReduceOp.SUM

    def clip_(self) -> Tensor:
        """Scale the gradients in place, once :attr:`partial` is of all ranks; returns the global norm."""
        total = self.partial if self._is_max else self.partial.pow(1 / self._clipping.norm_type)
        self._clipping.scale_to_(self._gradients, total.float())
        return total


class Alone:
    """The update of a loop that has no stage: gradients are averaged already, by DDP or by whatever the user does."""

    def __init__(self, zero: ZeroRedundancyOptimizer, exchange: Exchange) -> None:
        self._zero = zero
        self._exchange = exchange
        self._plans: list[Plan] = []
        self._layout: tuple[int, ...] = ()

    @torch.no_grad()
    def step(self, scaling: Scaling, *, is_joined: bool = False) -> None:
        """Update what this rank owns with its part of ``.grad``; bring the others' parts in.

        Under PyTorch's ``Join`` the ranks that have inputs left lend their gradients to those that ``is_joined``; ours
        leaves the mean in ``.grad`` there.
        """
        zero = self._zero
        zero.begin()
        pending = [s for s in zero.shards.values() if s.parameter.grad is not None]
        gradients = [shard.gradient() for shard in pending]
        if zero.is_joining and active_join(zero.process_group) is None:
            pending, gradients = lend_gradients(zero, is_joined=is_joined)
        if scaling.forbids_step():
            return
        owned = [(shard, part) for shard, part in zip(pending, gradients, strict=True) if shard.own is not None]
        scaling.unscale_([part for _, part in owned])
        zero.update(owned)
        self._gather(pending)

    def _gather(self, stepped: Sequence[Shard]) -> None:
        """Bring what each rank owns to all: of trainable parameters, and of others that had a gradient left."""
        plans = self._current_plans({id(shard) for shard in stepped})
        gathers = [_Gather(index=place, plan=plan) for place, plan in enumerate(plans)]
        group = self._zero.process_group
        run_on_group(
            gathers,
            lambda gather: self._exchange.gather(gather.plan, group),
            group=group,
            device=self._zero.join_device,
        )

    def _current_plans(self, stepped: set[int]) -> list[Plan]:
        trained = [s for s in self._zero.shards.values() if s.parameter.requires_grad or id(s) in stepped]
        layout = tuple(id(shard.parameter) for shard in trained)
        if layout != self._layout:
            self._layout = layout
            self._plans = [self._plan(members) for members in _in_buckets(trained)]
        return self._plans

    def _plan(self, members: Sequence[Shard]) -> Plan:
        plan = make_plan(
            [shard.parameter for shard in members],
            self._zero.shards,
            rank=self._zero.rank,
            is_even=self._zero.partition == "element",
        )
        assert plan is not None, "made of shards"
        return plan


def _in_buckets(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards of one dtype, in their order, some 25 MB at a time."""
    open_ones: dict[torch.dtype, list[Shard]] = {}
    full: list[list[Shard]] = []
    for shard in shards:
        bucket = open_ones.setdefault(shard.parameter.dtype, [])
        bucket.append(shard)
        if sum(member.parameter.nbytes for member in bucket) >= _BUCKET_BYTES:
            full.append(open_ones.pop(shard.parameter.dtype))
    return [*full, *open_ones.values()]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Gather(Item):
    plan: Plan
