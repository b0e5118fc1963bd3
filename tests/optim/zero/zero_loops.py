"""The loops of the sharded update beside plain DDP's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from harness import Record, assert_parity, overlapped_step, plain_step, train, wrap
from harness.models import Case
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero import exchange

# The weights of these models then travel by themselves, their biases packed, and the parts of a gather are smaller than
# a bucket.
exchange._LARGE_NUMEL = 50
exchange._LEAST_BYTES = 64

STEPS = 6
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = functools.partial(torch.optim.AdamW, **ADAMW_OPTIONS)
# How the update is made: the arguments of the stage, None for no stage at all.
FORMS: dict[str, dict[str, Any] | None] = {
    "interleaved": {},
    "interleaved, gather in forward": {"gather": "forward"},
    "deferred": {"deferred": True},
    "deferred, gather in forward": {"deferred": True, "gather": "forward"},
    "automatic": {"automatic": True},
    "automatic, deferred": {"automatic": True, "deferred": True},
    "alone": None,
}


class Consolidated:
    """What `train` takes for the optimizer: it asks for the whole state after every fourth step, which rank 0 gets."""

    def __init__(self, zero: ZeroRedundancyOptimizer, *, calls_step: bool) -> None:
        self.zero, self.calls_step = zero, calls_step
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.calls_step:
            self.zero.step()
        self.zero.wait()

    def zero_grad(self) -> None:
        self.zero.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        # Bringing it together takes longer than a step.
        if self.steps % 4 != 1:
            return {}
        self.zero.consolidate_state_dict()
        return self.zero.state_dict() if self.zero.rank == 0 else {}


def scheduled(holder: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(getattr(holder, "zero", holder), gamma=0.9)


def plain_run(
    case: Case, rank: int, make: Callable[[Any], torch.optim.Optimizer], parameters: Any = None
) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    given = ddp.parameters() if parameters is None else parameters(ddp)
    return train(ddp, make(given), case.batches(rank, steps=STEPS), step_fn=plain_step)


def zero_run(
    case: Case,
    rank: int,
    cls: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    form: dict[str, Any] | None,
    *,
    zero_options: dict[str, Any] | None = None,
    parameters: Any = None,
) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    given = ddp.parameters() if parameters is None else parameters(ddp)
    zero = ZeroRedundancyOptimizer(given, cls, overlap_with_ddp=form is not None, **arguments, **(zero_options or {}))
    register(form, ddp, zero)
    holder = Consolidated(zero, calls_step=form is None or not form.get("automatic"))
    step_fn = plain_step if form is None else overlapped_step
    return train(ddp, holder, case.batches(rank, steps=STEPS), step_fn=step_fn, scheduler=scheduled)


def register(form: dict[str, Any] | None, ddp: Any, zero: ZeroRedundancyOptimizer) -> None:
    """Let a stage of this form, if any, update `zero` in `ddp`'s backward."""
    if form is not None:
        chain(ZeroStep(zero, **form)).register(ddp)


def check(candidate: list[Record], reference: list[Record], *, what: str, world_size: int) -> None:
    """Parameters, buffers, losses and (on rank 0) the optimizer's state of every step."""
    candidate = [dataclasses.replace(record, gradients=None) for record in candidate]
    reference = [
        dataclasses.replace(theirs, gradients=None, optimizer=theirs.optimizer if ours.optimizer else {})
        for ours, theirs in zip(candidate, reference, strict=True)
    ]
    if world_size <= 2:
        assert_parity(candidate, reference, what=what)
        return
    reason = "three gradients are added up in ranks' order, Gloo's ring adds them in another"
    assert_parity(candidate, reference, what=what, exact=False, rtol=2e-4, atol=2e-5, reason=reason)
