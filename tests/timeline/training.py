"""A model and the loop that trains it while it is recorded."""

from __future__ import annotations

from typing import Any

import torch

from harness import wrap
from harness.models import MLP


def make_model(case: Any = MLP) -> Any:
    return wrap(case.model(), **case.ddp_options())


def run_backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def train_on(ddp: Any, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        run_backward(ddp, step, rank)
        optimizer.step()


def make_sgd(ddp: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
