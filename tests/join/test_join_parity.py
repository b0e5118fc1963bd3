"""Training under Join equals plain DDP and its optimizer under PyTorch's Join, and ends alike on every rank."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from join_loops import (
    BATCHES,
    TOLD_BY,
    assert_same_on_every_rank,
    overlapped_body,
    plain_body,
    snapshot,
    train_unevenly,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case
from overlap import (
    AllGather,
    AllReduce,
    Cast,
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = (ADAMW, MOMENTUM)
FALLING = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)

# Reducers; with what PyTorch's hook is compared where the values are rounded.
REDUCERS: dict[str, Callable[[], Any]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "bf16": lambda: Cast(torch.bfloat16),
}
UPDATES: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "deferred": {"deferred": True},
    "clipped": {"clip_grad_norm": 0.05},
}


def _rounded(state, bucket):
    """The hook under a name that DDP does not refuse on Gloo."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _clipped_body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
    optimizer.step()


def _reference(case: Case, rank: int, make: Any, *, update: str, hook: Any = None, **options: Any) -> dict[str, Any]:
    """Plain DDP under PyTorch's Join; only on the rank that runs longest is the optimizer's state right."""
    ddp = wrap(case.model(), **case.ddp_options())
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = make(ddp.parameters())
    scheduler = FALLING(optimizer)
    body = _clipped_body if update == "clipped" else plain_body
    with TorchJoin([ddp], **options):
        for step in range(BATCHES[rank]):
            body(ddp, optimizer, case.batch(step, rank), 1.0)
            scheduler.step()
    return snapshot(ddp, optimizer)


def _check(ours: dict[str, Any], reference: dict[str, Any], rank: int, what: str) -> None:
    if BATCHES[rank] < max(BATCHES):
        ours, reference = {"model": ours["model"]}, {"model": reference["model"]}
    assert_parity(ours, reference, what=what)


def _chained(rank: int, reducer: str, update: str, divides: bool, make: Any, told_by: tuple[str, ...]) -> list[Any]:
    """A chain of ``reducer`` and ``update``, under a Join told in each of ``told_by``."""
    options = {"divide_by_initial_world_size": divides}
    hook = _rounded if reducer == "bf16" else None
    reference = _reference(MLP, rank, make, update=update, hook=hook, **options)
    results = []
    for told in told_by:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(make(ddp.parameters()))
        scheduler = FALLING(optimizer)
        chain(REDUCERS[reducer](), Step(optimizer, **UPDATES[update])).register(ddp)
        ours = train_unevenly(
            ddp,
            optimizer,
            MLP,
            rank,
            told,
            body=overlapped_body,
            joinables=[ddp, optimizer, scheduler],
            scheduler=scheduler,
            **options,
        )
        _check(ours, reference, rank, f"{reducer}, {update}, {told}")
        results.append((reducer, divides, told, {**ours, "scheduler": scheduler.state_dict()["last_epoch"]}))
    return results


def _chains(rank: int, world_size: int) -> list[Any]:
    """Each next combination takes the next choice of what is not combined with all."""
    results = []
    for number, (reducer, update) in enumerate(itertools.product(REDUCERS, UPDATES)):
        # PyTorch's hook, with which bf16 is compared, divides by all ranks.
        divides = reducer == "bf16" or number % 2 == 0
        told_by = TOLD_BY[number % 2 :][:1]
        results += _chained(rank, reducer, update, divides, OPTIMIZERS[number % 2], told_by)
    return results


def test_chains_equal_plain_ddp() -> None:
    assert_same_on_every_rank(run_ranks(_chains, 2, timeout_s=180), what="2 ranks")


def _plain(ddp: Any, case: Case, rank: int, told_by: str, options: dict[str, Any]) -> dict[str, Any]:
    """A plain optimizer."""
    optimizer = ADAMW(ddp.parameters())
    scheduler = FALLING(optimizer)
    joinables = [ddp, optimizer, scheduler]
    return train_unevenly(ddp, optimizer, case, rank, told_by, joinables=joinables, scheduler=scheduler, **options)


def _automatic(ddp: Any, case: Case, rank: int, told_by: str, options: dict[str, Any]) -> dict[str, Any]:
    """An optimizer that is stepped in backward alone."""
    optimizer = ADAMW(ddp.parameters())
    scheduler = FALLING(optimizer)
    chain(AllReduce(), Step(optimizer, deferred=told_by == "batches")).register(ddp)

    def body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
        torch.nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()

    joinables = [ddp, scheduler]
    return train_unevenly(
        ddp, optimizer, case, rank, told_by, body=body, joinables=joinables, scheduler=scheduler, **options
    )


def _sharded(ddp: Any, case: Case, rank: int, told_by: str, options: dict[str, Any]) -> dict[str, Any]:
    """Our ZeroRedundancyOptimizer."""
    is_plain = case is BATCH_NORM
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, overlap_with_ddp=not is_plain
    )
    if not is_plain:
        chain(ZeroStep(zero, deferred=told_by == "forwards")).register(ddp)
    return _train_sharded(ddp, zero, case, rank, told_by, options, clears=is_plain)


def _pytorchs_sharded(ddp: Any, case: Case, rank: int, told_by: str, options: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's ZeroRedundancyOptimizer."""
    with warnings.catch_warnings(action="ignore"):  # Importing it scripts functions, which is deprecated.
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    make: Any = TorchZero
    zero = make(ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    return _train_sharded(ddp, zero, case, rank, told_by, options, clears=True)


def _train_sharded(
    ddp: Any, zero: Any, case: Case, rank: int, told_by: str, options: dict[str, Any], *, clears: bool
) -> dict[str, Any]:
    scheduler = FALLING(zero)
    train_unevenly(
        ddp,
        _Stateless(zero),
        case,
        rank,
        told_by,
        body=plain_body if clears else overlapped_body,
        joinables=[ddp, zero, scheduler],
        scheduler=scheduler,
        **options,
    )
    return {"model": snapshot(ddp, None)["model"]}


class _Stateless:
    """A sharded optimizer, whose whole state no rank has."""

    def __init__(self, zero: Any) -> None:
        self.step, self.zero_grad = zero.step, zero.zero_grad

    def state_dict(self) -> dict[str, Any]:
        return {}


OTHER_OPTIMIZERS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": _plain,
    "automatic": _automatic,
    "sharded": _sharded,
    "PyTorch's sharded": _pytorchs_sharded,
}


def _other_optimizer(rank: int, name: str, case: Case, divides: bool, ways: tuple[str, ...]) -> list[Any]:
    options = {"divide_by_initial_world_size": divides}
    reference = _reference(case, rank, ADAMW, update="plain", **options)
    results = []
    for told_by in ways:
        ddp = wrap(case.model(), **case.ddp_options())
        ours = OTHER_OPTIMIZERS[name](ddp, case, rank, told_by, options)
        _check(ours, {key: reference[key] for key in ours}, rank, told_by)
        results.append((told_by, ours))
    return results


def _other_optimizers(rank: int, world_size: int) -> list[Any]:
    cases = ((MLP, True, TOLD_BY), (BATCH_NORM, False, TOLD_BY[1:]))
    return [_other_optimizer(rank, name, *case) for name, case in itertools.product(OTHER_OPTIMIZERS, cases)]


def test_other_optimizers_equal_plain_ddp() -> None:
    assert_same_on_every_rank(run_ranks(_other_optimizers, 2, timeout_s=180), what="2 ranks")
