"""An optimizer that exists already is sharded with all that it is, and goes on as plain DDP's, bit for bit."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from harness import assert_parity, on_ranks, plain_step, wrap
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


@on_ranks(2)
def test_moments_of_16_bits_become_those_of_masters(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model().bfloat16())
    plain = torch.optim.Adam(ddp.parameters(), lr=0.01)
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    for load in (False, True):
        if load:
            zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, master_dtype=torch.float32)
            zero.load_state_dict(plain.state_dict())
        else:
            zero = ZeroRedundancyOptimizer.from_optimizer(plain, master_dtype=torch.float32)
        zero.consolidate_state_dict(to=None)
        moments = [state["exp_avg"] for state in zero.state_dict()["state"].values()]
        assert_parity(moments, [plain.state[p]["exp_avg"].float() for p in ddp.parameters()], what=f"{load=}")


@on_ranks(2)
def test_it_goes_on_bit_for_bit_with_groups_defaults_and_state(rank: int, world_size: int) -> None:
    for name, build in BUILT.items():
        for before in (0, 3) if name == "of a factory" else (3,):
            plain, ddp = wrap(MLP.model(), **MLP.ddp_options()), wrap(MLP.model(), **MLP.ddp_options())
            reference, optimizer = build(plain), build(ddp)
            for step, batch in enumerate(MLP.batches(rank, steps=before + 3)):
                if step == before:
                    zero = ZeroRedundancyOptimizer.from_optimizer(optimizer, overlap_with_ddp=True)
                    assert type(zero.optim) is type(reference) and reference.defaults.items() <= zero.defaults.items()
                    registration = chain(ZeroStep(zero)).register(ddp)
                plain_step(plain, reference, batch, mean_squared_error)
                plain_step(ddp, optimizer if step < before else zero, batch, mean_squared_error)
                assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{name} after {before}: {step}")
            zero.consolidate_state_dict(to=None)
            assert_parity(zero.state_dict(), reference.state_dict(), what=f"{name} after {before}")
            registration.remove()


def _sgd(ddp: Any) -> Any:
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


# An edit of an SGD, and part of the error.
EDITED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda sgd: sgd.register_step_post_hook(print), r"has the hook .*zero\.register_step_post_hook"),
    (lambda sgd: sgd.register_load_state_dict_pre_hook(print), "has the hook"),
    (lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, step_size=1), "has a learning rate scheduler"),
    (patch_step, r"step\(\) of this SGD was replaced"),
    (lambda sgd: setattr(sgd, "scale", torch.ones(2)), r"SGD\.scale is .*load_state_dict"),
]
# An argument that is not a plain optimizer, and part of the error.
GIVEN: list[tuple[Callable[[Any], Any], str]] = [
    (lambda ddp: OverlappedOptimizer(_sgd(ddp)), r"pass the \.optimizer that it wraps"),
    (lambda ddp: FunctionalAdam(list(ddp.parameters())), "plain optimizer.*FunctionalAdam"),
    (lambda ddp: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam), "sharded already"),
    (lambda ddp: torch.optim.Adam, "plain optimizer such as"),
    (lambda ddp: ddp, "plain optimizer such as"),
]


@on_ranks(2)
def test_what_cannot_be_taken_over_is_refused(rank: int, world_size: int) -> None:
    for edit, match in EDITED:
        sgd = _sgd(wrap(MLP.model()))
        edit(sgd)
        with pytest.raises(UnsupportedError, match=match):
            ZeroRedundancyOptimizer.from_optimizer(sgd)
    for given, match in GIVEN:
        with pytest.raises(ConfigurationError, match=match):
            ZeroRedundancyOptimizer.from_optimizer(given(wrap(MLP.model())))
    with pytest.raises(UnsupportedError, match="neither known nor declared"):
        ZeroRedundancyOptimizer.from_optimizer(CountingSGD(MLP.model().parameters()))
    ddp = wrap(MLP.model())
    blocks = BlockwiseAdamW(ddp.parameters())
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    blocks.step()
    with pytest.raises(UnsupportedError, match="partition='parameter'"):
        ZeroRedundancyOptimizer.from_optimizer(blocks, partition="element")


@on_ranks(2)
def test_the_whole_state_of_an_optimizer_that_is_dropped_is_freed(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    plain = torch.optim.AdamW(ddp.parameters())
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    plain.step()
    kept = [weakref.ref(plain), weakref.ref(plain.state[next(ddp.parameters())]["exp_avg"])]
    zero = ZeroRedundancyOptimizer.from_optimizer(plain)
    del plain
    gc.collect()
    assert [one() for one in kept] == [None, None] and zero.state
