"""Optimizers that must be stepped whole: refused where they would be stepped bucket by bucket, exact elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_loops import SGD, NoScheduler, overlapped_ddp, plain_ddp
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

from harness import assert_parity, overlapped_step, run_ranks, third_party, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    OptimizerHookState,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    allreduce_hook,
    chain,
    hook_then_optimizer,
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


class _Dropped(nn.Module):
    """Layers that are computed again in backward, with the same dropout masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x).tanh(), 0.3)
        hidden = checkpoint(lambda h: nn.functional.dropout(self.middle(h).tanh(), 0.3), hidden, use_reentrant=False)
        out: torch.Tensor = self.last(hidden)
        return out


def _masks_and_noise(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = _Dropped()
    values = []
    for overlapped in (False, True):
        torch.manual_seed(rank)
        ddp = wrap(module)
        optimizer: Any = third_party.SGLD(ddp.parameters())
        if overlapped:
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.full((3, 16), float(step))).square().mean().backward()
            optimizer.step()
        values.append([*(parameter.detach() for parameter in ddp.parameters()), torch.get_rng_state()])
    assert_parity(values[1], values[0], what="dropout that is computed again, and noise in step()")


def test_noise_in_a_deferred_step_and_dropout_that_is_computed_again_are_those_of_plain_ddp() -> None:
    run_ranks(_masks_and_noise, 2)


def _sam(ddp: Any, optimizer: Any, batch: Any, loss_of: Any) -> Any:
    loss = loss_of(ddp, batch)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    loss_of(ddp, batch).backward()
    optimizer.second_step(zero_grad=True)
    return loss


def _sharpness_aware(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=STEPS)
    make = functools.partial(third_party.SAM, base=torch.optim.SGD, lr=0.1)
    reference = train(*plain_ddp(MLP, make), batches, step_fn=_sam, scheduler=NoScheduler)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
    candidate = train(ddp, overlapped, batches, step_fn=_sam, scheduler=NoScheduler)
    assert_parity(candidate, reference, what="SAM, deferred")


def test_an_optimizer_with_two_steps_of_its_own_is_exact_when_deferred() -> None:
    run_ranks(_sharpness_aware, 2)


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


def _through_a_hook(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=STEPS)
    reference = train(*plain_ddp(MLP, third_party.Lion), batches, scheduler=NoScheduler)
    ddp = wrap(MLP.model())
    optimizer = third_party.Lion(ddp.parameters())
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
    for batch in batches:
        optimizer.zero_grad()
        mean_squared_error(ddp, batch).backward()
    candidate = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    assert_parity(candidate, reference[-1].parameters, what="Lion through DDP's own hook")


def test_a_hook_of_ddps_own_takes_an_optimizer_that_was_declared() -> None:
    run_ranks(_through_a_hook, 2)
