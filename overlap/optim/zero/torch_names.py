"""The sharded update under the names of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp
from overlap.errors import ConfigurationError
from overlap.hooks import Chain, Stage, StageHook, chain
from overlap.hooks.adapters import CommHook, as_stage
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.step import ZeroStep, check_covered

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: Stage | CommHook | Callable[..., Any],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> StageHook:
    """``chain(hook, ZeroStep(zero, deferred=True, automatic=True))`` for ``ddp.register_comm_hook(hook_state, ...)``,
    whose ``hook_state`` becomes the state of ``hook``, a communication hook or a reducer.

    The loop calls no ``zero.step()`` (a call does nothing) and calls ``zero_grad()`` as usual. ``shard_buckets`` is
    accepted for compatibility; every bucket is divided among the ranks.

    Raises:
        ConfigurationError: ``zero`` was not made with ``overlap_with_ddp=True``, or has others than ``ddp``.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    >>> loss_fn(ddp(x), y).backward()
    """
    return _hook(hook, ddp, zero, deferred=True, name="hook_with_zero_step")


def hook_with_zero_step_interleaved(
    hook: Stage | CommHook | Callable[..., Any],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> StageHook:
    """As :func:`hook_with_zero_step`, with each bucket updated and gathered as soon as it is reduced.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    >>> ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    >>> loss_fn(ddp(x), y).backward()
    """
    return _hook(hook, ddp, zero, deferred=False, name="hook_with_zero_step_interleaved")


def _hook(
    hook: Stage | CommHook | Callable[..., Any],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    deferred: bool,
    name: str,
) -> StageHook:
    ddp = check_ddp(ddp)
    update = ZeroStep(zero, deferred=deferred, automatic=True)
    if not zero.overlap_with_ddp:
        raise ConfigurationError(
            f"{name} updates in backward: make the ZeroRedundancyOptimizer with overlap_with_ddp=True"
        )
    shards = zero.shards.values()
    check_covered([shard.parameter for shard in shards], [shard.name for shard in shards], set(ddp.parameters()))

    def build(hook_state: Any) -> Chain:
        return chain(as_stage(hook, hook_state), update)

    group = ddp.process_group
    return StageHook(build, f"{name}({getattr(hook, '__name__', repr(hook))})", group_of=lambda hook_state: group)
