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
from overlap.optim.zero.step import ZeroStep

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: Stage | CommHook | Callable[..., Any],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> StageHook:
    """``chain(hook, ZeroStep(zero, deferred=True, automatic=True))`` for ``ddp.register_comm_hook(hook_state, ...)``,
    whose ``hook_state`` becomes the state of ``hook``.

    The loop calls no ``zero.step()`` (a call does nothing) and calls ``zero_grad()`` as usual. Every iteration makes an
    update. With an all-reduce as ``hook`` a step sends 1.5 times as much as DDP's.

    Args:
        hook: a communication hook or a reducer.
        ddp: the model; it must have all parameters of ``zero``.
        zero: made with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility; every bucket is always divided among the ranks.

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
    trained = {id(parameter) for parameter in ddp.parameters()}
    outside = [shard.name for key, shard in zero.shards.items() if key not in trained]
    if outside:
        raise ConfigurationError(
            f"{len(outside)} parameters of the ZeroRedundancyOptimizer are not in this model, the first is {outside[0]}"
        )

    def build(hook_state: Any) -> Chain:
        return chain(as_stage(hook, hook_state), update)

    group = ddp.process_group
    return StageHook(build, f"{name}({getattr(hook, '__name__', repr(hook))})", group_of=lambda hook_state: group)
