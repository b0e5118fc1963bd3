"""Training under Join equals plain DDP and its optimizer under PyTorch's Join, and ends alike on every rank."""

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

from harness import assert_parity, on_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case
from overlap import AllReduce, Cast, OverlappedOptimizer, Step, chain

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
FALLING = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)


def _rounded(state, bucket):
    """The hook under a name that DDP does not refuse on Gloo."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _reference(case: Case, rank: int, make: Any, *, hook: Any = None, **options: Any) -> dict[str, Any]:
    """Plain DDP under PyTorch's Join; only on the rank that runs longest is the optimizer's state right."""
    ddp = wrap(case.model(), **case.ddp_options())
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = make(ddp.parameters())
    scheduler = FALLING(optimizer)
    with TorchJoin([ddp], **options):
        for step in range(BATCHES[rank]):
            plain_body(ddp, optimizer, case.batch(step, rank), 1.0)
            scheduler.step()
    return snapshot(ddp, optimizer)


def _check(ours: dict[str, Any], reference: dict[str, Any], rank: int, what: str) -> None:
    whole = ours.keys() if BATCHES[rank] == max(BATCHES) else ("model",)
    assert_parity({key: ours[key] for key in whole}, {key: reference[key] for key in whole}, what=what)


# The reducer of each chain, its optimizer, whether it is deferred, by what gradients are divided, and how Join is told.
# PyTorch's hook, with which rounded values are compared, divides by all ranks.
CHAINS: list[tuple[Callable[[], Any], Any, bool, bool, str]] = [
    (AllReduce, ADAMW, False, True, "forwards"),
    (AllReduce, MOMENTUM, True, False, "batches"),
    (AllReduce, MOMENTUM, False, False, "forwards"),
    (lambda: Cast(torch.bfloat16), ADAMW, True, True, "batches"),
]


@on_ranks(2, timeout_s=180)
def test_chains_equal_plain_ddp(rank: int, world_size: int) -> None:
    for make_reducer, make, deferred, divides, told_by in CHAINS:
        options = {"divide_by_initial_world_size": divides}
        reducer = make_reducer()
        reference = _reference(MLP, rank, make, hook=_rounded if isinstance(reducer, Cast) else None, **options)
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(make(ddp.parameters()))
        scheduler = FALLING(optimizer)
        chain(reducer, Step(optimizer, deferred=deferred)).register(ddp)
        how = {"body": overlapped_body, "scheduler": scheduler, **options}
        ours = train_unevenly(ddp, optimizer, MLP, rank, told_by, **how)
        _check(ours, reference, rank, f"{reducer}, {options}, {told_by}")
        assert_same_on_every_rank({**ours, "scheduler": scheduler.last_epoch}, what=f"{reducer}")


def _pytorchs_sharded(parameters: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # Importing it scripts functions, which is deprecated.
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    make: Any = TorchZero
    return make(parameters, torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@on_ranks(2, timeout_s=180)
def test_other_optimizers_equal_plain_ddp(rank: int, world_size: int) -> None:
    for case, divides, ways in ((MLP, True, TOLD_BY), (BATCH_NORM, False, TOLD_BY[1:])):
        options: dict[str, Any] = {"divide_by_initial_world_size": divides}
        reference = _reference(case, rank, ADAMW, **options)
        for make, told_by in itertools.product((ADAMW, _pytorchs_sharded), ways):
            ddp = wrap(case.model(), **case.ddp_options())
            optimizer = make(ddp.parameters())
            ours = train_unevenly(ddp, optimizer, case, rank, told_by, scheduler=FALLING(optimizer), **options)
            _check(ours, reference, rank, told_by)
            assert_same_on_every_rank(ours, what=told_by)
