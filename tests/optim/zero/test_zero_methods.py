"""Methods of the optimizer's class get a rank's part; those that switch parameters are followed by a gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain, declare


@declare("element")
class Averaged(torch.optim.Optimizer):
    """Trains beside an average of the parameters, and evaluates at it, as schedule-free methods do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if to_train else 1 - 1 / 0.9)
            group["train_mode"] = to_train

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]

    def shrink(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Tensor]) -> float:
        return group["lr"] * (2 if "z" in state else 1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], 1 / group["k"] * 0.9).sub_(p.grad, alpha=0.01)


def _trained(rank: int, form: str) -> tuple[Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer: Any
    if form == "plain":
        optimizer = Averaged(ddp.parameters())
    else:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Averaged, lr=0.1)
        if form != "without a stage":
            gather = "forward" if form == "gathered in forward" else "backward"
            chain(ZeroStep(optimizer, gather=gather)).register(ddp)
    for epoch in range(2):
        optimizer.train()
        for step in range(3):
            optimizer.zero_grad()
            mean_squared_error(ddp, MLP.batch(3 * epoch + step, rank)).backward()
            optimizer.step()
        optimizer.eval()
    return ddp, optimizer


def _switched(rank: int, world_size: int) -> None:
    plain, its = _trained(rank, "plain")
    for form in ("in backward", "gathered in forward", "without a stage"):
        ddp, zero = _trained(rank, form)
        assert_parity(ddp.module.state_dict(), plain.module.state_dict(), what=form)
        zero.param_groups[0]["lr"] = 0.05
        assert zero.rates() == [0.05]
        parameter = zero.param_groups[0]["params"][0]
        assert zero._get_lr(zero.param_groups[0], its.state[parameter]) == 0.05
        assert not hasattr(zero, "rate") and hasattr(zero, "eval")
        with pytest.raises(TrainingLoopError, match=r"Averaged.shrink\(\) has changed parameters"):
            zero.shrink()


def test_methods_of_the_class_are_called_and_those_that_switch_parameters_gather() -> None:
    run_ranks(_switched, 2)
