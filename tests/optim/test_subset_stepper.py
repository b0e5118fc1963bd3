"""Stepping a part of an optimizer's parameters, without DDP."""

from __future__ import annotations

import pytest
import torch
from step_loops import CountsOutsideGroups
from torch import nn

from harness.models import MLP
from overlap import UnsupportedError
from overlap.optim.subset import SubsetStepper


@pytest.mark.parametrize("where", ["state", "tensor", "box"])
def test_a_counter_that_both_parts_change_is_refused_wherever_it_is(where: str) -> None:
    model = MLP.model()
    optimizer = CountsOutsideGroups(model.parameters())
    optimizer.where = where
    stepper = SubsetStepper(optimizer)
    first, *rest = model.parameters()
    stepper.begin()
    stepper.step([first], [torch.ones_like(first)])
    with pytest.raises(UnsupportedError, match="deferred=True"):
        stepper.step(rest, [torch.ones_like(parameter) for parameter in rest])


def test_parameters_that_change_groups_take_the_new_groups_hyperparameters() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}])
    stepper = SubsetStepper(optimizer)
    groups = optimizer.param_groups
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    stepper.begin()
    stepper.step([first, second], [torch.ones(1), torch.ones(1)])
    assert (first.item(), second.item()) == (-0.5, -1.0)


class _Forgets(torch.optim.SGD):
    """Notes something within a step, which is gone after it."""

    notes: list[str]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.notes.append("began")
        super().step()
        del self.notes


def test_an_attribute_that_a_step_changes_and_deletes_is_no_error() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = _Forgets([parameter], lr=1.0)
    optimizer.notes = []
    SubsetStepper(optimizer).step([parameter], [torch.ones(1)])
    assert parameter.item() == -1


class _CountsUnderAnotherName(torch.optim.SGD):
    """Counts its steps in its state, in the place of what was there before the first."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.state.pop("is new", None)
        self.state["count"] = self.state.get("count", 0) + 1


def test_a_counter_that_takes_the_place_of_another_entry_is_refused() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = _CountsUnderAnotherName([first, second], lr=1.0)
    optimizer.state["is new"] = True
    stepper = SubsetStepper(optimizer)
    stepper.begin()
    stepper.step([first], [torch.ones(1)])
    with pytest.raises(UnsupportedError, match="'count' at every call"):
        stepper.step([second], [torch.ones(1)])
