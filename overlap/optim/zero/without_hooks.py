"""ZeRO without DDP hooks: the update for a loop that registers no stage and only calls ``zero.step()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap.hooks.engine.background import run_now
from overlap.hooks.engine.executors import executor_for
from overlap.join.active import active_join
from overlap.join.group_collectives import all_reduce, broadcast
from overlap.optim.grad_scaler import LossScale
from overlap.optim.veto import Veto
from overlap.optim.zero.bucket_shards import BucketShards, shards_of_bucket
from overlap.optim.zero.exchange import Exchange, Gather
from overlap.optim.zero.sharding import Ownership, Shard, flatten, raise_versions_of

__all__ = ["UpdateWithoutHooks"]

# The size of DDP's buckets.
_BUCKET_BYTES = 25 * 2**20

Update = Callable[[Sequence[tuple[Shard, Tensor]], Veto], None]
"""Steps what this rank owns of each shard with its part of the gradient, if nothing speaks against it."""


class UpdateWithoutHooks:
    """Updates from ``.grad``, which DDP or the user's own code has averaged on every rank."""

    def __init__(self, ownership: Ownership, exchange: Exchange) -> None:
        self._ownership = ownership
        self._exchange = exchange
        self._executor = executor_for(ownership.group, ownership.device)
        self._buckets: list[BucketShards] = []
        self._layout: tuple[int, ...] = ()

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        update: Update,
        loss_scale: LossScale,
        *,
        is_joining: bool,
        is_joined: bool = False,
    ) -> None:
        """Call ``update``, which steps ``optimizer``, with this rank's parts of ``.grad``; then gather the parameters.

        ``is_joining`` says that a ``Join`` is in force, ``is_joined`` that this rank has run out of inputs. PyTorch's
        ``Join`` leaves no ``.grad`` on such a rank, so another rank lends its own; overlap's ``Join`` leaves the mean.

        Issues: gathers of all trainable parameters. Under PyTorch's ``Join`` before them one all-reduce of a number, a
        broadcast of one byte per parameter, and one broadcast per gradient.
        """
        pending = [s for s in self._ownership.shards.values() if s.parameter.grad is not None]
        gradients = [shard.gradient() for shard in pending]
        if is_joining and active_join(self._ownership.group) is None:
            pending, gradients = _lend_gradients(self._ownership, is_joined=is_joined)
        if loss_scale.skips_step(optimizer):
            return
        owned = [(shard, part) for shard, part in zip(pending, gradients, strict=True) if shard.own is not None]
        loss_scale.unscale_([part for _, part in owned])
        update(owned, Veto(loss_scale.verdict_for(optimizer)))
        raise_versions_of(self._ownership.shards.values())
        self._gather(pending)

    def _gather(self, stepped: Sequence[Shard]) -> None:
        """Gather all trainable parameters, and others that had a gradient."""
        buckets = self._current_buckets({id(shard) for shard in stepped})
        gathers = [Gather(index=place, shards=shards) for place, shards in enumerate(buckets)]
        group = self._ownership.group
        run_now(gathers, lambda gather: self._exchange.gather(gather.shards, group), self._executor)

    def _current_buckets(self, stepped: set[int]) -> list[BucketShards]:
        trained = [s for s in self._ownership.shards.values() if s.parameter.requires_grad or id(s) in stepped]
        layout = tuple(id(shard.parameter) for shard in trained)
        if layout != self._layout:
            self._layout = layout
            buckets = [[shard.parameter for shard in members] for members in _in_buckets(trained)]
            found = [shards_of_bucket(parameters, [self._ownership]) for parameters in buckets]
            self._buckets = [shards for shards in found if shards is not None]
        return self._buckets


def _lend_gradients(ownership: Ownership, *, is_joined: bool) -> tuple[list[Shard], list[Tensor]]:
    """The shards to step and this rank's parts of their averaged gradients, also if this rank ``is_joined``.

    DDP sets no ``.grad`` on a rank that has run out of inputs, so the first rank with inputs left broadcasts its own.

    Issues: one all-reduce of a number, one broadcast of one byte per parameter, and one broadcast per gradient.
    """
    group, device, rank = ownership.group, ownership.device, ownership.group.rank()
    lender = torch.tensor([group.size() if is_joined else rank], device=device)
    all_reduce(lender, op=dist.ReduceOp.MIN, group=group)
    src = int(lender.item())
    shards = list(ownership.shards.values())
    has_gradient = torch.tensor([s.parameter.grad is not None for s in shards], dtype=torch.uint8, device=device)
    broadcast(has_gradient, src=src, group=group)
    lent = [shard for shard, flag in zip(shards, has_gradient.tolist(), strict=True) if flag]
    parts: list[Tensor] = []
    for shard in lent:
        whole = torch.empty_like(shard.parameter)
        if rank == src and shard.parameter.grad is not None:
            whole.copy_(shard.parameter.grad)
        flat = flatten(whole)
        broadcast(flat, src=src, group=group)
        start, end = shard.range
        parts.append(flat[start:end])
    return lent, parts


def _in_buckets(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards of one dtype, in their order, about 25 MB in each bucket."""
    open_ones: dict[torch.dtype, list[Shard]] = {}
    full: list[list[Shard]] = []
    for shard in shards:
        bucket = open_ones.setdefault(shard.parameter.dtype, [])
        bucket.append(shard)
        if sum(member.parameter.nbytes for member in bucket) >= _BUCKET_BYTES:
            full.append(open_ones.pop(shard.parameter.dtype))
    return [*full, *open_ones.values()]
