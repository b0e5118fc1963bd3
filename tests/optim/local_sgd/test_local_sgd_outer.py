"""Local SGD with an outer optimizer: DiLoCo and its streaming form."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from local_loops import assign, local, mean_of, plain, run, values_of
from torch import nn

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap.optim.local_sgd import LocalSGD
from overlap.optim.local_sgd.model_tensors import into_fragments

PERIOD = 4
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
DILOCO = functools.partial(LocalSGD, period=PERIOD, start_step=0, outer=OUTER)


class _Reference:
    """DiLoCo as the paper has it, with the fragments of the streaming form."""

    def __init__(self, fragments: list[list[str]]) -> None:
        start = {name: p.detach().clone() for name, p in MLP.model().named_parameters()}
        self.global_values, self.momentum = start, {name: torch.zeros_like(p) for name, p in start.items()}
        self.is_first = dict.fromkeys(start, True)
        self.fragments, self.round = fragments, 0

    def after_step(self, model: nn.Module, optimizer: Any, count: int) -> None:
        if count % PERIOD:
            return
        names = self.fragments[self.round % len(self.fragments)]
        self.round += 1
        means = mean_of({name: value for name, value in values_of(model).items() if name in names})
        for name in names:
            gradient = self.global_values[name] - means[name]
            first, self.is_first[name] = self.is_first[name], False
            self.momentum[name] = gradient.clone() if first else 0.9 * self.momentum[name] + gradient
            self.global_values[name] = self.global_values[name] - 0.7 * (gradient + 0.9 * self.momentum[name])
        assign(model, {name: self.global_values[name] for name in names})


@pytest.mark.parametrize("fragments", [1, 3])
def test_each_parameter_is_in_one_fragment(fragments: int) -> None:
    parameters = dict(MLP.model().named_parameters())
    made = into_fragments(parameters, fragments)
    assert len(made) == fragments
    assert sorted(name for part in made for name in part) == sorted(parameters)


def _diloco(rank: int, world_size: int, fragments: int) -> None:
    candidate, made, _ = local(MLP, rank, steps=16, build=functools.partial(DILOCO, fragments=fragments))
    reference = _Reference(made.synchronizer.tensors.fragments)
    assert len(reference.fragments) == fragments
    assert_parity(
        candidate,
        plain(MLP, rank, steps=16, start_step=0, after_step=reference.after_step),
        what=f"DiLoCo, {fragments} fragments",
        exact=False,
        rtol=1e-4,
        atol=1e-6,
        reason="the update is one expression here, and kernels elsewhere",
    )


@pytest.mark.parametrize("fragments", [1, 3])
def test_nesterov_momentum_is_diloco(fragments: int) -> None:
    run_ranks(_diloco, 2, fragments)


def _synchronize_twice(rank: int, world_size: int) -> None:
    _, made, ddp = local(MLP, rank, steps=PERIOD, build=DILOCO)
    averaged = values_of(ddp.module)
    made.synchronize()
    assert_parity(values_of(ddp.module), averaged, what="synchronized after an average")


def test_synchronizing_right_after_an_average_does_not_apply_the_momentum_again() -> None:
    run_ranks(_synchronize_twice, 2)


def _restart(rank: int, world_size: int) -> None:
    _, made, ddp = local(MLP, rank, steps=PERIOD + 1, build=DILOCO)
    with pytest.warns(UserWarning, match="starts again from step 0"):
        made.load_state_dict(made.optim.state_dict())
    ddp.module.load_state_dict(MLP.model(seed=9).state_dict())
    made.param_groups[0]["lr"] = 0.0
    run(MLP, rank, range(PERIOD), ddp, made)
    assert_parity(values_of(ddp.module), values_of(MLP.model(seed=9)), what="restarted, and nothing learnt")


def test_after_a_plain_optimizers_state_the_round_begins_at_the_model_as_it_is() -> None:
    run_ranks(_restart, 2)


def _rate_one(rank: int, world_size: int, overlap: bool) -> None:
    build = functools.partial(LocalSGD, period=PERIOD, start_step=3, overlap=overlap)
    averaged, _, _ = local(MLP, rank, steps=14, build=build)
    build = functools.partial(build, outer=functools.partial(torch.optim.SGD, lr=1.0))
    stepped, _, _ = local(MLP, rank, steps=14, build=build)
    assert_parity(
        stepped, averaged, what="outer SGD of rate 1", exact=False, rtol=1e-4, atol=1e-6,
        reason="x - (x - mean) is rounded",
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
def test_outer_sgd_of_rate_1_is_the_plain_average(overlap: bool) -> None:
    run_ranks(_rate_one, 2, overlap)


def _half(rank: int, world_size: int, outer: Any) -> None:
    model = nn.Linear(3, 3, bias=False).bfloat16()
    ddp = wrap(model)
    made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=1.0), 1, 0, average_dtype=torch.float32, outer=outer)
    storage = ddp.module.weight.data_ptr()
    made.zero_grad()
    (ddp(torch.full((1, 3), 0.01 + rank, dtype=torch.bfloat16)).sum()).backward()
    own = (model.weight.detach() - ddp.module.weight.grad).float()
    made.step()
    mean = mean_of({"": own})[""].bfloat16()
    assert_parity(ddp.module.weight.detach(), mean, what="bfloat16")
    assert ddp.module.weight.data_ptr() == storage


@pytest.mark.parametrize("outer", [None, functools.partial(torch.optim.SGD, lr=1.0)], ids=["average", "outer"])
def test_half_precision_is_averaged_in_a_wider_dtype(outer: Any) -> None:
    run_ranks(_half, 2, outer)
