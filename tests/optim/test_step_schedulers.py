"""Learning-rate schedulers act on an update in backward as they do on `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from step_loops import SGD, overlapped_ddp, plain_ddp
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from harness import assert_parity, overlapped_step, run_ranks, train
from harness.models import MLP


class _PlateauEveryStep:
    """The plateau scheduler with a loss that never falls."""

    def __init__(self, optimizer: Any) -> None:
        self.scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    def step(self) -> None:
        self.scheduler.step(1.0)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=12),  # Cycles momentum, too.
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "ReduceLROnPlateau": _PlateauEveryStep,
}
EVERY_SCHEDULER = pytest.mark.parametrize("name", SCHEDULERS)


def _scheduled(rank: int, world_size: int, name: str, on_wrapped: bool) -> None:
    scheduler, batches = SCHEDULERS[name], MLP.batches(rank, steps=8)
    ddp, optimizer = plain_ddp(MLP, SGD)
    reference = train(ddp, optimizer, batches, scheduler=scheduler)
    ddp, overlapped, _ = overlapped_ddp(MLP, SGD)
    scheduled = overlapped.optimizer if on_wrapped else overlapped
    candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, scheduler=lambda _: scheduler(scheduled))
    assert_parity(candidate, reference, what=name)


@EVERY_SCHEDULER
def test_a_scheduler_of_the_overlapped_optimizer_sets_the_rate_of_the_next_backward(name: str) -> None:
    run_ranks(_scheduled, 2, name, False)


@EVERY_SCHEDULER
def test_a_scheduler_of_the_wrapped_optimizer_sets_the_rate_of_the_next_backward(name: str) -> None:
    run_ranks(_scheduled, 2, name, True)
