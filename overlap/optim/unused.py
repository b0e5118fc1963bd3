"""Which parameters of a bucket have a gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import to_device
from overlap.errors import UnsupportedError
from overlap.hooks import Bucket, all_reduce
from overlap.join.active import active_join

__all__ = ["tell_used", "used_on_any_rank"]


async def used_on_any_rank(
    bucket: Bucket, parameters: Sequence[Tensor], finds_unused: bool | None, *, used_before: Collection[int] = ()
) -> list[bool]:
    """For each of ``parameters``, whether any rank has a gradient for it; DDP's bucket holds zeros where none has.

    ``used_before`` are the parameters, by ``id``, that a rank which replays counts as its own: DDP takes what any rank
    used in the pass before, and whether a gradient is zero or none is told from that.

    The host waits for the answer, on an accelerator for all that it computes before that.

    Issues: one all-reduce of a byte a parameter where DDP looks for unused parameters (``finds_unused``), and nothing
    where it does not, since every parameter then has a gradient.

    Raises:
        UnsupportedError: it is not known whether DDP looks for them, and one is unused on this rank.
    """
    if finds_unused is False or not parameters:
        return [True] * len(parameters)
    join = active_join(bucket.group)
    if bucket.is_replay and not (join is not None and join.replays_own_gradients):
        local = [id(parameter) in used_before for parameter in parameters]
    else:
        local = [parameter.grad is not None for parameter in parameters]
    if finds_unused is None:
        if not bucket.is_replay and not all(local):
            raise UnsupportedError(
                "a parameter has no gradient on this rank, and a hook registered with ddp.register_comm_hook is not "
                "told whether that is meant; register with overlap.register(ddp, hook)"
            )
        return [True] * len(parameters)
    return [bool(flag) for flag in (await _over_ranks(bucket, local)).tolist()]


async def tell_used(bucket: Bucket, parameters: Sequence[Tensor]) -> None:
    """Take part in :func:`used_on_any_rank` of ranks that replay, where this rank's own ``.grad`` will tell it what
    they ask; DDP looks for unused parameters. The host does not wait.

    Issues: one all-reduce of a byte a parameter.
    """
    if parameters:
        await _over_ranks(bucket, [parameter.grad is not None for parameter in parameters])


async def _over_ranks(bucket: Bucket, local: Sequence[bool]) -> Tensor:
    flags = to_device(torch.tensor(local, dtype=torch.uint8), bucket.buffer.device)
    await all_reduce(flags, op=dist.ReduceOp.MAX, group=bucket.group)
    return flags
