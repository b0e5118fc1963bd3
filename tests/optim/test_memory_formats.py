"""Parameters that are dense but not contiguous, such as channels_last weights: exactly plain DDP in every form."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_formats import CHANNELS_LAST, CHANNELS_LAST_3D, PERMUTED

import overlap
from harness import Record, assert_parity, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import Case
from overlap import AllReduce, Cast, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

STEPS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "sgd foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
}
Prepared = tuple[Any, Any, Callable[..., Any]]


class _OutsideTheLoop:
    """An optimizer that the loop does not step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class _Zero(_OutsideTheLoop):
    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        super().__init__(zero)
        self.zero = zero

    def step(self) -> None:
        self.zero.step()
        self.zero.wait()

    def state_dict(self) -> dict[str, Any]:
        self.zero.consolidate_state_dict()
        return self.zero.state_dict() if self.zero.rank == 0 else {}


def _step(ddp: Any, make: Callable[[Any], Any], **options: Any) -> Prepared:
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return optimizer, optimizer, overlapped_step


def _part(ddp: Any, make: Callable[[Any], Any]) -> Prepared:
    return _step(ddp, make, params=list(ddp.parameters())[::2])


def _cast(ddp: Any, make: Callable[[Any], Any]) -> Prepared:
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    chain(Cast(torch.float64), Step(optimizer)).register(ddp)  # Wider, so nothing is rounded on the way.
    return optimizer, optimizer, overlapped_step


def _automatic(ddp: Any, make: Callable[[Any], Any], **options: Any) -> Prepared:
    optimizer = make(ddp.parameters())
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return optimizer, _OutsideTheLoop(optimizer), overlapped_step


def _functional(ddp: Any, make: Any) -> Prepared:
    functional = getattr(overlap.optim, f"Functional{make.func.__name__}")(ddp.parameters(), **make.keywords)
    chain(AllReduce(), Step(functional)).register(ddp)
    return functional.optimizer, _OutsideTheLoop(functional.optimizer), overlapped_step


def _hook_then_optimizer(ddp: Any, make: Callable[[Any], Any]) -> Prepared:
    optimizer = make(ddp.parameters())
    hook = overlap.hook_then_optimizer(overlap.allreduce_hook, overlap.OptimizerHookState(optimizer))
    ddp.register_comm_hook(None, hook)

    def step(model: Any, held: Any, batch: Any, loss_of: Any) -> Any:
        optimizer.zero_grad()
        return overlapped_step(model, held, batch, loss_of)

    return optimizer, _OutsideTheLoop(optimizer), step


def _zero(ddp: Any, make: Any, **options: Any) -> Prepared:
    partition = options.pop("partition", "element")
    has_stage, is_first = options.pop("has_stage", True), options.pop("is_first", True)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), make.func, overlap_with_ddp=has_stage, partition=partition, **make.keywords
    )
    if has_stage:
        stages = [ZeroStep(zero, **options)] if is_first else [AllReduce(), ZeroStep(zero, **options)]
        chain(*stages).register(ddp)
    return zero, _Zero(zero), overlapped_step if has_stage else plain_step


FORMS: dict[str, Callable[[Any, Any], Prepared]] = {
    "interleaved": _step,
    "deferred": functools.partial(_step, deferred=True),
    "a part": _part,
    "cast": _cast,
    "automatic": _automatic,
    "automatic deferred": functools.partial(_automatic, deferred=True),
    "functional": _functional,
    "hook_then_optimizer": _hook_then_optimizer,
    "ZeRO": _zero,
    "ZeRO deferred": functools.partial(_zero, deferred=True),
    "ZeRO gathered in forward": functools.partial(_zero, gather="forward"),
    "ZeRO after a reducer": functools.partial(_zero, is_first=False),
    "ZeRO by parameter": functools.partial(_zero, partition="parameter"),
    "ZeRO without a stage": functools.partial(_zero, has_stage=False),
}


def _compared(record: Record, rank: int, form: str) -> Record:
    return dataclasses.replace(record, optimizer={}) if form.startswith("ZeRO") and rank != 0 else record


def _train(case: Case, rank: int, ddp: Any, prepared: Prepared) -> list[Record]:
    optimizer, held, step_fn = prepared

    def schedule(_: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    return train(ddp, held, case.batches(rank, steps=STEPS), step_fn=step_fn, scheduler=schedule)


def _check(rank: int, world_size: int, case: Case, name: str, as_views: bool) -> None:
    cls, options = OPTIMIZERS[name]
    make = functools.partial(cls, **options)
    plain = wrap(case.model(), **case.ddp_options(), gradient_as_bucket_view=as_views)
    plain_optimizer = make(plain.parameters())
    reference = _train(case, rank, plain, (plain_optimizer, plain_optimizer, plain_step))
    assert not all(p.is_contiguous() for p in plain.parameters())
    for form, prepare in FORMS.items():
        ddp = wrap(case.model(), **case.ddp_options(), gradient_as_bucket_view=as_views)
        candidate = _train(case, rank, ddp, prepare(ddp, make))
        expected = [_compared(record, rank, form) for record in reference]
        assert_parity(candidate, expected, what=f"{form} with {name}, {case}")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((CHANNELS_LAST, name) for name in OPTIMIZERS),
        (CHANNELS_LAST_3D, "sgd foreach"),
        (CHANNELS_LAST_3D, "adam"),
        (PERMUTED, "sgd"),
        (PERMUTED, "adamw foreach"),
    ],
    ids=str,
)
def test_dense_parameters_that_are_not_contiguous_are_updated_exactly_in_every_form(case: Case, name: str) -> None:
    run_ranks(_check, 2, case, name, name.endswith("foreach"))
