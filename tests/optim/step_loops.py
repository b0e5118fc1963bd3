"""Plain DDP beside DDP with an update in backward, and optimizers of the kinds that other libraries have."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness import registered, wrap  # noqa: F401 - tests beside this file import the first from here
from harness.models import MLP, Case
from overlap import (
    AllReduce,
    OverlappedOptimizer,
    Registration,
    Step,
    chain,
    declare,
)

Make = Callable[[Any], torch.optim.Optimizer]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def plain_ddp(case: Case, make: Make) -> tuple[Any, torch.optim.Optimizer]:
    ddp = wrap(case.model(), **case.ddp_options())
    return ddp, make(ddp.parameters())


def overlapped_ddp(case: Case, make: Make, **step_options: Any) -> tuple[Any, OverlappedOptimizer, Registration]:
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    return ddp, optimizer, chain(AllReduce(), Step(optimizer, **step_options)).register(ddp)


def settle(optimizer: Any) -> None:
    """Wait for gathers, before parameters are read."""
    if hasattr(optimizer, "wait"):
        optimizer.wait()


def backward(model: nn.Module, step: int, rank: int) -> None:
    """The backward of one batch."""
    model(*MLP.batch(step, rank).inputs).square().mean().backward()


class NoScheduler:
    """A scheduler that leaves the rate as it is, and notes nothing in the optimizer's groups."""

    def __init__(self, optimizer: Any) -> None:
        pass

    def step(self) -> None:
        pass


class SignSGD(torch.optim.Optimizer):
    """Neither known nor declared."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = self.rate(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-rate)


@declare("element")
class Counting(SignSGD):
    """Counts its steps wherever optimizers do: in groups, by rebinding and in place, and in an attribute."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.calls = 0
        for group in self.param_groups:
            group.update(step=0, recent=[[0, 0.0], [0, 0.0]])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def rate(self, group: dict[str, Any]) -> float:
        group["step"] += 1
        group["recent"][group["step"] % 2][:] = [group["step"], group["lr"] / group["step"]]
        return float(group["recent"][group["step"] % 2][1])
