"""Clipping by hand of gradients of which a rank has parts: up to the order of summation that of plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain

FORMS = ("deferred", "gathered in forward", "without a stage")


def _zero(ddp: Any, form: str) -> ZeroRedundancyOptimizer:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if form == "deferred":
        chain(ZeroStep(zero, deferred=True)).register(ddp)
    elif form == "gathered in forward":
        chain(ZeroStep(zero, deferred=True, gather="forward")).register(ddp)
    return zero


def _clip(rank: int, world_size: int, norm_type: float, max_norm: float) -> None:
    for form in FORMS:
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, zero = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), _zero(ddp, form)
        is_exact = form == "without a stage"  # The optimizer's order is the model's here.
        for batch in MLP.batches(rank, steps=5):
            reference.zero_grad()
            mean_squared_error(plain, batch).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            reference.step()
            zero.zero_grad()
            mean_squared_error(ddp, batch).backward()
            norm = zero.clip_grad_norm_(max_norm, norm_type)
            zero.step()
            norms = [torch.zeros_like(norm) for _ in range(world_size)]
            torch.distributed.all_gather(norms, norm)
            assert all(torch.equal(norm, other) for other in norms)
            tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(norm, expected, **tolerance)
        zero.wait()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.1), (float("inf"), 0.01), (2.0, 1e9)])
def test_clipping_zero_by_hand_is_that_of_plain_ddp(norm_type: float, max_norm: float) -> None:
    run_ranks(_clip, 2, norm_type, max_norm)


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match=r"made in backward: use ZeroStep\(zero, deferred=True\)"):
        zero.clip_grad_norm_(1.0)
    zero.step()
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp, "deferred")
    with pytest.raises(TrainingLoopError, match="between a synchronized backward and step"):
        zero.clip_grad_norm_(1.0)
    loss = mean_squared_error(ddp, MLP.batch(0, rank)) * float("inf")
    loss.backward()
    with pytest.raises(TrainingLoopError, match="so they cannot be clipped"):
        zero.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_zero_where_there_is_nothing_to_clip_is_refused() -> None:
    run_ranks(_refused, 2)


def _by_hand(rank: int, world_size: int) -> None:
    for unscales in (False, True):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = _zero(ddp, "deferred")
        for step in range(3):
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            for parameter in ddp.parameters():
                parameter.grad.mul_(0.25 if unscales else 1.0)
            if step == 1:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)  # Multiplies by 1.
            if step < 2:
                zero.step()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        with pytest.raises(TrainingLoopError, match=r"use zero\.clip_grad_norm_\(max_norm\)"):
            zero.step()


def test_clipping_zero_by_hand_with_torchs_function_is_an_error_where_it_binds() -> None:
    run_ranks(_by_hand, 2)


def _large() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))


def _clip_each_layer(model: torch.nn.Sequential) -> None:
    for layer in (model[0], model[2]):
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)


def _clip_one_that_rank_0_exceeds(model: torch.nn.Sequential) -> None:
    if torch.distributed.get_rank() == 0:
        torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1e-3)


CLIPS: dict[str, Callable[[torch.nn.Sequential], Any]] = {
    "all": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "the head alone": lambda model: torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1e-3),
    "a bias alone": lambda model: torch.nn.utils.clip_grad_norm_([model[2].bias], 1e-3),
    "each layer": _clip_each_layer,
    "on one rank alone": _clip_one_that_rank_0_exceeds,
}


@torch.no_grad()
def _clip_values(model: torch.nn.Sequential) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)


@torch.no_grad()
def _mask(model: torch.nn.Sequential) -> None:
    model[0].weight.grad.mul_(torch.arange(256) % 3 > 0)
    model[2].weight.grad.zero_()


@torch.no_grad()
def _scale_all(model: torch.nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(3.0).mul_(0.7)


@torch.no_grad()
def _scale_a_layer(model: torch.nn.Sequential) -> None:
    model[2].weight.grad.mul_(0.3)


EDITS: dict[str, Callable[[torch.nn.Sequential], Any]] = {
    "values cut": _clip_values,
    "one parameter's values cut": lambda model: torch.nn.utils.clip_grad_value_([model[0].bias], 1e-6),
    "masks": _mask,
    "a factor for all": _scale_all,
    "a factor for a layer": _scale_a_layer,
}


def _edit_by_hand(rank: int, world_size: int, dtype: torch.dtype) -> None:
    inputs = torch.randn(512, 256, generator=torch.Generator().manual_seed(1 + rank)).to(dtype)
    if dtype is torch.bfloat16:
        inputs *= 1 + rank  # The function rounds the factor itself to bfloat16: closer ones would be the same.
    for partition in ("element", "parameter"):
        for name, edit in {**CLIPS, **EDITS}.items():
            ddp, plain = wrap(_large().to(dtype)), wrap(_large().to(dtype))
            zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, partition=partition)
            chain(ZeroStep(zero, deferred=True)).register(ddp)
            ddp(inputs).square().mean().backward()
            edit(ddp.module)
            if name in CLIPS:
                with pytest.raises(TrainingLoopError, match=r"use zero\.clip_grad_norm_\(max_norm\)"):
                    zero.step()
                continue
            zero.step()
            plain(inputs).square().mean().backward()
            edit(plain.module)
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_models_clip_by_norm_is_an_error_on_every_rank_and_other_edits_are_those_of_ddp(
    dtype: torch.dtype,
) -> None:
    run_ranks(_edit_by_hand, 2, dtype)
