"""Two optimizers beside each other, on plain DDP and in one chain: matrices by one, all else by the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from harness import Record, assert_parity, overlapped_step, plain_step, train, wrap
from harness.models import Case
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero import exchange

# The weights of these models then travel by themselves, their biases packed.
exchange._LARGE_NUMEL = 50

STEPS = 5
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
Pair = tuple[Any, Any]


def divided(ddp: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The matrices, and all other parameters."""
    parameters = list(ddp.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


class Both:
    """What `train` takes for the optimizer: two that are stepped and scheduled, each by itself."""

    def __init__(self, pair: Pair, *, steps: Sequence[Any] | None = None) -> None:
        self.pair = pair
        self.steps = pair if steps is None else steps

    def step(self) -> None:
        for optimizer in self.steps:
            optimizer.step()
        for optimizer in self.pair:
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.wait()

    def zero_grad(self) -> None:
        for optimizer in self.pair:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        states = {}
        for name, optimizer in zip(("muon", "adamw"), self.pair, strict=True):
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.consolidate_state_dict()
            states[name] = optimizer.state_dict()
        return states


class Schedulers:
    """One for each optimizer, and not the same."""

    def __init__(self, both: Both) -> None:
        muon, adamw = both.pair
        self.schedulers = [StepLR(muon, 2, gamma=0.5), ExponentialLR(adamw, gamma=0.9)]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


def plain_pair(ddp: Any) -> Pair:
    matrices, others = divided(ddp)
    return torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)


def overlapped_pair(ddp: Any) -> Pair:
    muon, adamw = plain_pair(ddp)
    return OverlappedOptimizer(muon), OverlappedOptimizer(adamw)


def zero_pair(ddp: Any) -> Pair:
    matrices, others = divided(ddp)
    return (
        ZeroRedundancyOptimizer(matrices, torch.optim.Muon, **MUON),
        ZeroRedundancyOptimizer(others, torch.optim.AdamW, **ADAMW),
    )


def mixed_pair(ddp: Any) -> Pair:
    matrices, others = divided(ddp)
    return (
        ZeroRedundancyOptimizer(matrices, torch.optim.Muon, **MUON),
        OverlappedOptimizer(torch.optim.AdamW(others, **ADAMW)),
    )


def plain_run(case: Case, rank: int, *, step_fn: Any = plain_step, **ddp_options: Any) -> list[Record]:
    ddp = wrap(case.model(), **{**case.ddp_options(), **ddp_options})
    return train(
        ddp,
        Both(plain_pair(ddp)),
        case.batches(rank, steps=STEPS),
        step_fn=step_fn,
        scheduler=Schedulers,
    )


@dataclasses.dataclass(frozen=True)
class Form:
    """A pair of optimizers, and the stages that update with them."""

    pair: Callable[[Any], Pair]
    stages: Callable[[Any, Any], Sequence[Any]]


def several_run(
    case: Case, rank: int, form: Form, *, step_fn: Any = overlapped_step, **ddp_options: Any
) -> list[Record]:
    ddp = wrap(case.model(), **{**case.ddp_options(), **ddp_options})
    pair = form.pair(ddp)
    registration = chain(*form.stages(*pair)).register(ddp)
    automatic = [stage.form.is_automatic for stage in registration.stage.sequence if hasattr(stage, "form")]
    steps = [one for one, is_automatic in zip(pair, automatic, strict=True) if not is_automatic]
    records = train(
        ddp,
        Both(pair, steps=steps),
        case.batches(rank, steps=STEPS),
        step_fn=step_fn,
        scheduler=Schedulers,
    )
    registration.remove()
    return records


FORMS: dict[str, Form] = {
    "both interleaved": Form(overlapped_pair, lambda m, a: [AllReduce(), Step(m), Step(a)]),
    "the first deferred": Form(overlapped_pair, lambda m, a: [AllReduce(), Step(m, deferred=True), Step(a)]),
    "both deferred": Form(overlapped_pair, lambda m, a: [AllReduce(), Step(m, deferred=True), Step(a, deferred=True)]),
    "automatic and not": Form(
        lambda ddp: (plain_pair(ddp)[0], overlapped_pair(ddp)[1]), lambda m, a: [AllReduce(), Step(m), Step(a)]
    ),
    "both sharded": Form(zero_pair, lambda m, a: [ZeroStep(m), ZeroStep(a)]),
    "both sharded, one deferred": Form(zero_pair, lambda m, a: [ZeroStep(m), ZeroStep(a, deferred=True)]),
    "both sharded, both deferred": Form(
        zero_pair, lambda m, a: [ZeroStep(m, deferred=True), ZeroStep(a, deferred=True)]
    ),
    "both sharded, gather in forward": Form(
        zero_pair, lambda m, a: [ZeroStep(m, gather="forward"), ZeroStep(a, gather="forward")]
    ),
    "sharded, one automatic": Form(zero_pair, lambda m, a: [ZeroStep(m, automatic=True, deferred=True), ZeroStep(a)]),
    "sharded beside whole": Form(mixed_pair, lambda m, a: [ZeroStep(m), Step(a)]),
    "sharded beside whole, deferred": Form(
        mixed_pair, lambda m, a: [ZeroStep(m, deferred=True), Step(a, deferred=True)]
    ),
    "sharded beside whole, after a reducer": Form(mixed_pair, lambda m, a: [AllReduce(), ZeroStep(m), Step(a)]),
}


def check(candidate: list[Record], reference: list[Record], *, what: str, rank: int, world_size: int = 2) -> None:
    """Parameters, buffers, losses and, on rank 0, the state of both optimizers, of every step."""
    candidate = [dataclasses.replace(record, gradients=None) for record in candidate]
    reference = [dataclasses.replace(record, gradients=None) for record in reference]
    if rank != 0:  # There the state is consolidated.
        candidate = [dataclasses.replace(record, optimizer={}) for record in candidate]
        reference = [dataclasses.replace(record, optimizer={}) for record in reference]
    if world_size <= 2:
        assert_parity(candidate, reference, what=what)
        return
    reason = "gradients of more than two ranks are added up in another order, and Muon works in bfloat16"
    assert_parity(candidate, reference, what=what, exact=False, rtol=2e-2, atol=2e-3, reason=reason)
