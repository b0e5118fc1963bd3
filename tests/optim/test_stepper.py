"""Stepping a part of an optimizer's parameters, without DDP."""

from typing import Any

import pytest
import torch
from step_loops import Counting, SignSGD
from torch import nn

from overlap import UnsupportedError
from overlap.optim.stepper import SubsetStepper


def test_a_part_is_stepped_with_the_rate_of_now() -> None:
    """The split of a part into groups is kept from step to step, and their options are not."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SignSGD([parameter], lr=1.0)
    stepper = SubsetStepper(optimizer)
    for optimizer.param_groups[0]["lr"] in (1.0, 0.5):
        stepper.begin()
        stepper.step([parameter], [torch.ones(1)])
        stepper.finish()
    assert parameter.item() == -1.5


def test_parts_that_differ_in_every_step_are_not_all_kept() -> None:
    """As with sub-networks drawn at random: each of 2**8 parts of eight parameters."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.0)
    stepper = SubsetStepper(optimizer)
    counts = [0] * 8
    for drawn in range(1, 2**8):
        part = [place for place in range(8) if drawn >> place & 1]
        stepper.begin()
        stepper.step([parameters[place] for place in part], [torch.ones(1)] * len(part))
        stepper.finish()
        for place in part:
            counts[place] += 1
    assert [optimizer.state[one]["step"].item() for one in parameters] == counts
    assert len(stepper._splits) <= 17 and len(stepper._kernels._runs) <= 17


def test_a_group_of_which_nothing_is_stepped_counts_with_the_others() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = Counting([{"params": [first]}, {"params": [second]}])
    second.grad = torch.ones(2)
    stepper = SubsetStepper(optimizer)
    stepper.begin()
    stepper.step([first], [torch.ones(2)])
    assert [group["step"] for group in optimizer.param_groups] == [0, 0] and optimizer.calls == 0
    stepper.finish()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1] and optimizer.calls == 1
    assert not second.any() and second.grad is not None
    assert optimizer.param_groups[1]["recent"] == [[0, 0.0], [1, 0.01]]


class _Writes(SignSGD):
    """Writes what `value` says of the group."""

    value: Any

    def rate(self, group: dict[str, Any]) -> float:
        group["written"] = type(self).value(group["params"])
        return 0.1


@pytest.mark.parametrize(
    ("value", "agrees"),
    [
        (lambda parameters: {"a": (1, [torch.zeros(1)])}, True),
        (lambda parameters: float("nan"), True),
        (lambda parameters: parameters[0].grad.sum(), False),
        (lambda parameters: parameters[0].numel() == 2, False),
    ],
)
def test_values_agree_if_they_are_equal(value: Any, agrees: bool) -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = type("Writer", (_Writes,), {"value": staticmethod(value)})([first, second])
    stepper = SubsetStepper(optimizer)
    stepper.begin()
    stepper.step([first], [torch.ones(2)])
    if agrees:
        stepper.step([second], [torch.ones(3)])
        stepper.finish()
        assert "written" in optimizer.param_groups[0]
    else:
        with pytest.raises(UnsupportedError, match="'written' of this Writer is"):
            stepper.step([second], [torch.full((3,), -1.0)])
