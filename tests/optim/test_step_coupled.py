"""Optimizers that must be stepped whole: refused where they would be stepped bucket by bucket, exact elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_loops import SGD, NoScheduler, overlapped_ddp, plain_ddp
from torch.optim.lr_scheduler import ExponentialLR

from harness import assert_parity, overlapped_step, run_ranks, third_party, train, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    chain,
)

STEPS = 6


def _rate_falls(optimizer: Any) -> ExponentialLR:
    return ExponentialLR(optimizer, gamma=0.9)


def _patched(params: Any) -> torch.optim.Optimizer:
    return third_party.patch_step(SGD(params))


def _patched_below_a_scheduler(params: Any) -> torch.optim.Optimizer:
    optimizer = _patched(params)
    ExponentialLR(optimizer, gamma=1.0)
    return optimizer


Make = Callable[[Any], torch.optim.Optimizer]
_UNKNOWN = "is neither known nor declared"
COUPLED: dict[str, tuple[Make, str]] = {
    "Lookahead": (lambda params: third_party.Lookahead(SGD(params)), _UNKNOWN),
    "delegating": (lambda params: third_party.DelegatingOptimizer(SGD(params)), _UNKNOWN),
    "by properties": (lambda params: third_party.PropertyWrapper(SGD(params)), _UNKNOWN),
    "step replaced": (_patched, "replaced on the object"),
    "step replaced, then scheduled": (_patched_below_a_scheduler, "replaced on the object"),
    "Prodigy": (third_party.Prodigy, _UNKNOWN),
    "LAMB, global norm": (third_party.ClippedLAMB, "LAMB is, but ClippedLAMB overrides its"),
    "counts in an object": (third_party.CountingSGD, _UNKNOWN),
    "noise": (third_party.SGLD, _UNKNOWN),
}


def _refused_in_backward(rank: int, world_size: int) -> None:
    for name, (make, why) in COUPLED.items():
        ddp = wrap(MLP.model())
        optimizer = make(ddp.parameters())
        for form in (Step(optimizer), Step(OverlappedOptimizer(optimizer))):
            with pytest.raises(UnsupportedError, match=f"{why}.*deferred=True") as refused:
                chain(AllReduce(), form).register(ddp)
            assert type(optimizer).__name__ in str(refused.value), name


def test_what_must_be_stepped_whole_is_refused_where_it_would_be_stepped_in_parts() -> None:
    run_ranks(_refused_in_backward, 2)


def _exact_when_deferred(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=STEPS)
    for name, (make, _) in COUPLED.items():
        torch.manual_seed(0)
        reference = train(*plain_ddp(MLP, make), batches, scheduler=NoScheduler)
        torch.manual_seed(0)
        ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
        candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, scheduler=NoScheduler)
        assert_parity(candidate, reference, what=f"{name}, deferred")


def test_what_must_be_stepped_whole_is_exact_when_deferred() -> None:
    run_ranks(_exact_when_deferred, 2)


class _Arguments(torch.optim.SGD):
    """Takes more than a closure."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return super().step(closure)


def _with_arguments(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=STEPS)

    def halved(ddp: Any, optimizer: Any, batch: Any, loss_of: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(ddp, batch)
        loss.backward()
        optimizer.step(factor=0.5)
        return loss

    make = functools.partial(_Arguments, lr=0.1)
    reference = train(*plain_ddp(MLP, make), batches, step_fn=halved)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
    assert_parity(train(ddp, overlapped, batches, step_fn=halved), reference, what="step(factor=0.5), deferred")


def test_other_arguments_of_step_reach_a_deferred_step() -> None:
    run_ranks(_with_arguments, 2)


class AcceleratedOptimizer(third_party.DelegatingOptimizer):
    """Has the class name by which Accelerate's is recognized."""


class LightningOptimizer:
    """Made as Lightning's is: it takes on the class of what it wraps, and hands on what it has not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("LightningSGD", (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _unwrapped(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=STEPS)
    reference = train(*plain_ddp(MLP, SGD), batches, scheduler=_rate_falls)
    for wrapper in (AcceleratedOptimizer, LightningOptimizer):
        inside: Callable[[Any], Any] = lambda params: wrapper(SGD(params))  # noqa: B023, E731
        ddp, overlapped, _ = overlapped_ddp(MLP, inside)
        assert type(overlapped.optimizer) is torch.optim.SGD
        candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, scheduler=_rate_falls)
        assert_parity(candidate, reference, what=f"{wrapper.__name__}, unwrapped")

        ddp = wrap(MLP.model())
        overlapped = OverlappedOptimizer(SGD(ddp.parameters()))
        outside = wrapper(overlapped)
        chain(AllReduce(), Step(outside)).register(ddp)
        schedule = functools.partial(ExponentialLR, overlapped, gamma=0.9)
        candidate = train(ddp, outside, batches, step_fn=overlapped_step, scheduler=lambda _: schedule())  # noqa: B023
        assert_parity(candidate, reference, what=f"{wrapper.__name__} around an OverlappedOptimizer")


def test_wrappers_of_accelerate_and_lightning_are_taken_off() -> None:
    run_ranks(_unwrapped, 2)
