"""Edits of the optimizer's state and groups by hand, between steps, are those of plain DDP or are refused by name."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, on_ranks, plain_step, wrap
from harness.models import MLP, mean_squared_error
from overlap import ConfigurationError, TrainingLoopError, UnsupportedError, ZeroRedundancyOptimizer, ZeroStep, chain


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _assign(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def _set_each(optimizer: Any) -> None:
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {}


def _delete_each(optimizer: Any) -> None:
    for parameter in list(optimizer.state):
        del optimizer.state[parameter]


def _scale(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5).nan_to_num_()
        state["exp_avg_sq"] *= 2
        state["step"].zero_()


@torch.no_grad()
def _mask(optimizer: Any) -> None:
    for parameter in _parameters(optimizer):
        if parameter in optimizer.state:
            optimizer.state[parameter]["exp_avg"].mul_(parameter > 0)


def _new_moments(optimizer: Any) -> None:
    for parameter in _parameters(optimizer):
        if parameter in optimizer.state:
            optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "assign": _assign,
    "set each": _set_each,
    "delete each": _delete_each,
    "pop one": lambda optimizer: optimizer.state.pop(_parameters(optimizer)[0]),
    "scale": _scale,
}
WHOLE = {"mask": _mask, "new moments": _new_moments}


@on_ranks(2)
def test_edits_of_zeros_state_and_groups_are_those_of_plain_ddp(rank: int, world_size: int) -> None:
    cases = [(True, edit, "element") for edit in ELEMENTWISE]
    cases += [(True, edit, "parameter") for edit in ("set each", "scale", *WHOLE)]
    for has_stage, edit, partition in [*cases, (False, "scale", "element")]:
        plain, ddp = (wrap(MLP.model()) for _ in range(2))
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, partition=partition)
        if has_stage:
            chain(ZeroStep(zero)).register(ddp)
        for step, batch in enumerate(MLP.batches(rank, steps=4)):
            for model, optimizer in ((plain, reference), (ddp, zero)):
                plain_step(model, optimizer, batch, mean_squared_error)
                if step == 1:
                    {**ELEMENTWISE, **WHOLE}[edit](optimizer)
        assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{edit}, {partition}")
        zero.consolidate_state_dict(to=None)
        assert_parity(zero.state_dict(), reference.state_dict(), what=f"state after {edit}, {partition}")


@on_ranks(2)
def test_edits_that_would_be_others_than_plain_ddps_are_refused_by_name(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match="the update was made in backward"):
        zero.state.clear()
    zero.step()
    weight = ddp.module[0].weight

    def of_part() -> Any:
        return zero.state[weight]["exp_avg"]

    for edit in (
        lambda: of_part().mul_(weight > 0),
        lambda: of_part() * weight,
        lambda: of_part().norm(),
        lambda: of_part().copy_(weight),
        lambda: of_part().normal_(),
        lambda: of_part()[3],
        lambda: of_part().__setitem__(3, 0.0),
        lambda: torch.sum(of_part()),
        lambda: of_part().numel(),
    ):
        with pytest.raises(UnsupportedError, match=r"partition='parameter'.*param in zero\.state.*load_state_dict"):
            edit()
    for edit in (lambda: zero.state[weight].update(exp_avg=weight), lambda: zero.state.update({weight: {"m": weight}})):
        with pytest.raises(ConfigurationError, match=r"of shape \(16, 16\).*partition='parameter'.*load_state_dict"):
            edit()
    with pytest.raises(ConfigurationError, match=r"set with 'exp_avg' of shape .*change the part in place"):
        zero.state[weight]["exp_avg"] = of_part() * 2
    zero.consolidate_state_dict(to=None)
    of_part().zero_()
    with pytest.raises(TrainingLoopError, match="not consolidated since it last changed"):
        zero.state_dict()
    other = wrap(MLP.model())
    whole = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=0.01, partition="parameter")
    mean_squared_error(other, MLP.batch(0, rank)).backward()
    whole.step()
    absent = next(parameter for parameter in other.parameters() if parameter not in whole.state)
    with pytest.raises(KeyError, match=r"another rank has the state.*`if param in zero\.state`"):
        whole.state[absent]["exp_avg"].zero_()
    zero.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ConfigurationError, match=r"changed by hand.*zero\.add_param_group"):
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()


@on_ranks(2)
def test_another_memory_format_is_refused_and_the_remedy_keeps_the_state(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)

    def step() -> None:
        ddp(torch.ones(2, 3, 6, 6)).square().mean().backward()
        zero.step()

    step()
    zero.consolidate_state_dict(to=None)
    before = zero.state_dict()["state"]
    ddp.module.to(memory_format=torch.channels_last)
    with pytest.raises(TrainingLoopError, match=r"has strides .*zero\.load_state_dict\(zero\.state_dict\(\)\)"):
        zero.step()
    zero.consolidate_state_dict(to=None)
    zero.load_state_dict(zero.state_dict())
    zero.consolidate_state_dict(to=None)
    assert_parity(zero.state_dict()["state"], before, what="state in another memory format")
    ddp = DistributedDataParallel(ddp.module)
    step()
