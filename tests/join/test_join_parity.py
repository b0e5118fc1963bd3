"""Training under Join equals plain DDP and its optimizer under PyTorch's Join, and ends alike on every rank."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from join_loops import BATCHES, WAYS, left, overlapped_body, plain_body, uneven
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
    allreduce_hook,
    as_stage,
    chain,
)

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SUMMATION = "Gloo's ring and what gathers add up in different orders"
FALLING = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)

# Reducers; with what PyTorch's hook is compared where the values are rounded.
REDUCERS: dict[str, Callable[[], Any]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "hook": lambda: as_stage(allreduce_hook),
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
    """Plain DDP under PyTorch's Join; the optimizer's state is right on the rank that runs longest alone."""
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
    return left(ddp, optimizer)


def _check(ours: dict[str, Any], reference: dict[str, Any], rank: int, world_size: int, what: str) -> None:
    if BATCHES[rank] < max(BATCHES):
        ours, reference = {"model": ours["model"]}, {"model": reference["model"]}
    if world_size == 2:
        assert_parity(ours, reference, what=what)
    else:
        assert_parity(ours, reference, what=what, exact=False, rtol=2e-3, atol=2e-4, reason=SUMMATION)


def _all_chains(rank: int, world_size: int, ways: tuple[str, ...]) -> list[Any]:
    """Every reducer and update, each with the next of the ways."""
    results = []
    for number, (reducer, update) in enumerate((r, u) for r in REDUCERS for u in UPDATES):
        both = (True, False) if world_size == 2 else (number % 2 == 0,)
        for divides in both if reducer != "bf16" else (True,):
            options = {"divide_by_initial_world_size": divides}
            hook = _rounded if reducer == "bf16" else None
            make = MOMENTUM if number % 2 else ADAMW
            reference = _reference(MLP, rank, make, update=update, hook=hook, **options)
            for way in ways[number % 2 :: 2]:
                ddp = wrap(MLP.model(), **MLP.ddp_options())
                optimizer = OverlappedOptimizer(make(ddp.parameters()))
                scheduler = FALLING(optimizer)
                chain(REDUCERS[reducer](), Step(optimizer, **UPDATES[update])).register(ddp)
                ours = uneven(
                    ddp,
                    optimizer,
                    MLP,
                    rank,
                    way,
                    body=overlapped_body,
                    joinables=[ddp, optimizer, scheduler],
                    scheduler=scheduler,
                    **options,
                )
                what = f"{reducer}, {update}, {way}, {divides=}, {world_size} ranks"
                _check(ours, reference, rank, world_size, what)
                results.append((what, {**ours, "scheduler": scheduler.state_dict()["last_epoch"]}))
    return results


def _same_on_every_rank(results: list[list[Any]]) -> None:
    for per_rank in zip(*results, strict=True):
        what, first = per_rank[0]
        for rank, (_, other) in enumerate(per_rank[1:], start=1):
            assert_parity(other, first, what=f"{what}: rank {rank} against rank 0")


def test_every_reducer_and_update_at_2_ranks() -> None:
    _same_on_every_rank(run_ranks(_all_chains, 2, WAYS, timeout_s=100))


def test_every_reducer_and_update_at_4_ranks() -> None:
    _same_on_every_rank(run_ranks(_all_chains, 4, ("loader", "stream"), timeout_s=100))


def _other_optimizers(rank: int, world_size: int, case: Case) -> list[Any]:
    """A plain optimizer, one stepped in backward alone, and sharded ones, ours and PyTorch's."""
    results = []
    for divides in (True, False) if case is MLP else (False,):
        options = {"divide_by_initial_world_size": divides}
        reference = _reference(case, rank, ADAMW, update="plain", **options)
        for way in WAYS:
            what = f"{case}, {way}, {divides=}"
            ddp = wrap(case.model(), **case.ddp_options())
            optimizer = ADAMW(ddp.parameters())
            scheduler = FALLING(optimizer)
            joinables = [ddp, optimizer, scheduler]
            ours = uneven(ddp, optimizer, case, rank, way, joinables=joinables, scheduler=scheduler, **options)
            _check(ours, reference, rank, world_size, f"plain, {what}")
            results.append((f"plain, {what}", ours))

            ddp = wrap(case.model(), **case.ddp_options())
            optimizer = ADAMW(ddp.parameters())
            scheduler = FALLING(optimizer)
            chain(AllReduce(), Step(optimizer, deferred=way == "stream")).register(ddp)
            ours = uneven(
                ddp,
                optimizer,
                case,
                rank,
                way,
                body=lambda ddp, optimizer, batch, scale: torch.nn.functional.mse_loss(
                    ddp(*batch.inputs), batch.target
                ).backward(),
                joinables=[ddp, scheduler],
                scheduler=scheduler,
                **options,
            )
            _check(ours, reference, rank, world_size, f"automatic, {what}")
            results.append((f"automatic, {what}", ours))

            ddp = wrap(case.model(), **case.ddp_options())
            zero: Any = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, overlap_with_ddp=way != "loader"
            )
            if way != "loader":
                chain(ZeroStep(zero, deferred=way == "lengths")).register(ddp)
            scheduler = FALLING(zero)
            ours = _model_of(ddp, zero, case, rank, way, scheduler, options, clears=way == "loader")
            _check(ours, {"model": reference["model"]}, rank, world_size, f"sharded, {what}")
            results.append((f"sharded, {what}", ours))

            ddp = wrap(case.model(), **case.ddp_options())
            zero = _torch_zero(ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
            scheduler = FALLING(zero)
            ours = _model_of(ddp, zero, case, rank, way, scheduler, options, clears=True)
            _check(ours, {"model": reference["model"]}, rank, world_size, f"PyTorch's sharded, {what}")
            results.append((f"PyTorch's sharded, {what}", ours))
    return results


def _model_of(
    ddp: Any, zero: Any, case: Case, rank: int, way: str, scheduler: Any, options: dict[str, Any], *, clears: bool
) -> dict[str, Any]:
    uneven(
        ddp,
        _Stateless(zero),
        case,
        rank,
        way,
        body=plain_body if clears else overlapped_body,
        joinables=[ddp, zero, scheduler],
        scheduler=scheduler,
        **options,
    )
    return {"model": left(ddp, None)["model"]}


def _torch_zero(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # Importing it scripts functions, which is deprecated.
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero(*args, **kwargs)


class _Stateless:
    """A sharded optimizer, whose whole state no rank has."""

    def __init__(self, zero: Any) -> None:
        self.step, self.zero_grad = zero.step, zero.zero_grad

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("case", [MLP, BATCH_NORM], ids=str)
def test_other_optimizers(case: Case) -> None:
    _same_on_every_rank(run_ranks(_other_optimizers, 2, case, timeout_s=100))
