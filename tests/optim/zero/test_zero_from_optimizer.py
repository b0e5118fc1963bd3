"""An optimizer that exists already is sharded with all that it is, and goes on as plain DDP's, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from harness.third_party import BlockwiseAdamW, CountingSGD, patch_step
from overlap import (
    ConfigurationError,
    OverlappedOptimizer,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
)
from overlap.optim import FunctionalAdam


@declare("element")
class Decaying(Optimizer):
    """SGD whose rate falls with a count of steps, in an attribute, to a floor that is not among its defaults."""

    def __init__(self, params: Any, lr: float, *, floor: float, power: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.floor, self.power, self.count = floor, power, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = max(group["lr"] / self.count**self.power, self.floor)
                    parameter.add_(parameter.grad, alpha=-rate)


def _factory(ddp: Any) -> Optimizer:
    """As nanoGPT's `configure_optimizers` and timm's `create_optimizer_v2`: two groups, decayed or not."""
    matrices = {"params": [p for p in ddp.parameters() if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in ddp.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr_scale": 0.5}
    return torch.optim.AdamW([matrices, others], lr=0.01, betas=(0.9, 0.95))


BUILT: dict[str, Callable[[Any], Optimizer]] = {
    "of a factory": _factory,
    "named": lambda ddp: torch.optim.SGD(ddp.module.named_parameters(), lr=0.1, momentum=0.9),
    "blocks": lambda ddp: BlockwiseAdamW(ddp.parameters()),
    "attributes": lambda ddp: Decaying(ddp.parameters(), lr=0.1, floor=0.03, power=0.5),
}


def _train(ddp: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        optimizer.step()


def _goes_on(rank: int, world_size: int) -> None:
    for name, build in BUILT.items():
        for before in (0, 3) if name == "of a factory" else (3,):
            plain, ddp = wrap(MLP.model(), **MLP.ddp_options()), wrap(MLP.model(), **MLP.ddp_options())
            reference, built = build(plain), build(ddp)
            _train(plain, reference, rank, range(before))
            _train(ddp, built, rank, range(before))
            zero = ZeroRedundancyOptimizer.from_optimizer(built, overlap_with_ddp=True)
            assert type(zero.optim) is type(built) and built.defaults.items() <= zero.defaults.items()
            registration = chain(ZeroStep(zero)).register(ddp)
            for step in range(before, before + 3):
                _train(plain, reference, rank, range(step, step + 1))
                _train(ddp, zero, rank, range(step, step + 1))
                assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{name} after {before}: {step}")
            zero.consolidate_state_dict(to=None)
            assert_parity(zero.state_dict(), reference.state_dict(), what=f"{name} after {before}")
            registration.remove()


def test_it_goes_on_bit_for_bit_with_groups_defaults_and_state() -> None:
    run_ranks(_goes_on, 2)


def _scheduled(optimizer: Any) -> Any:
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    return optimizer


def _hooked(optimizer: Any) -> Any:
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


def _hooked_state(optimizer: Any) -> Any:
    optimizer.register_load_state_dict_pre_hook(lambda *arguments: None)
    return optimizer


def _patched(optimizer: Any) -> Any:
    patch_step(optimizer)
    return optimizer


def _with_object(optimizer: Any) -> Any:
    optimizer.scale = torch.ones(2)
    return optimizer


def _sgd(ddp: Any) -> Any:
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


# By the case: what is given, the error, and a part of it.
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a step hook": (lambda ddp: _hooked(_sgd(ddp)), UnsupportedError, r"has the hook .*zero\.register_step_post_hook"),
    "a hook of states": (lambda ddp: _hooked_state(_sgd(ddp)), UnsupportedError, "has the hook"),
    "a scheduler": (lambda ddp: _scheduled(_sgd(ddp)), UnsupportedError, "has a learning rate scheduler"),
    "a step of its own": (lambda ddp: _patched(_sgd(ddp)), UnsupportedError, r"step\(\) of this SGD was replaced"),
    "an object": (lambda ddp: _with_object(_sgd(ddp)), UnsupportedError, r"SGD\.scale is .*load_state_dict"),
    "not declared": (lambda ddp: CountingSGD(ddp.parameters()), UnsupportedError, "neither known nor declared"),
    "overlapped": (
        lambda ddp: OverlappedOptimizer(_sgd(ddp)), ConfigurationError, r"pass the \.optimizer that it wraps"
    ),
    "functional": (
        lambda ddp: FunctionalAdam(list(ddp.parameters())), ConfigurationError, "plain optimizer.*FunctionalAdam"
    ),
    "sharded": (
        lambda ddp: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam), ConfigurationError, "sharded already"
    ),
    "a class": (lambda ddp: torch.optim.Adam, ConfigurationError, "plain optimizer such as"),
    "a model": (lambda ddp: ddp, ConfigurationError, "plain optimizer such as"),
}  # fmt: skip


def _refused(rank: int, world_size: int) -> None:
    for name, (given, error, match) in REFUSED.items():
        ddp = wrap(MLP.model())
        with pytest.raises(error, match=match):
            raise AssertionError(name, ZeroRedundancyOptimizer.from_optimizer(given(ddp)))
    ddp = wrap(MLP.model())
    blocks = BlockwiseAdamW(ddp.parameters())
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    blocks.step()
    with pytest.raises(UnsupportedError, match="partition='parameter'"):
        ZeroRedundancyOptimizer.from_optimizer(blocks, partition="element")


def test_what_cannot_be_taken_over_is_refused() -> None:
    run_ranks(_refused, 2)


def _freed(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    plain = torch.optim.AdamW(ddp.parameters())
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    plain.step()
    kept = [weakref.ref(plain), weakref.ref(plain.state[next(ddp.parameters())]["exp_avg"])]
    zero = ZeroRedundancyOptimizer.from_optimizer(plain)
    del plain
    gc.collect()
    assert [one() for one in kept] == [None, None] and zero.state


def test_the_whole_state_of_an_optimizer_that_is_dropped_is_freed() -> None:
    run_ranks(_freed, 2)
