"""What a loop does between backward and step(): what changes nothing is accepted, what would be lost is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_forms import FORMS, INTERLEAVED, backward, check_equal, check_refused

from harness import run_ranks

REST = ("deferred", "clipped")


def _clip_for_logging(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(20):
        backward(ddp, step, rank)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()


def _clip_that_does_not_bind(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(ddp, step, rank)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e6)
        for parameter in ddp.parameters():
            parameter.grad = torch.nan_to_num(parameter.grad)  # The same values in another tensor.
        optimizer.step()


def _clip_after_step(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(ddp, step, rank)
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))


def _add_group(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(ddp, step, rank)
        if step == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        optimizer.step()


INERT = (_clip_for_logging, _clip_that_does_not_bind, _clip_after_step)


def _inert(rank: int, world_size: int, form: str) -> None:
    for loop in INERT:
        for view in (False, True):
            check_equal(form, loop, rank, gradient_as_bucket_view=view)
    if not form.startswith("zero"):
        check_equal(form, _add_group, rank)


@pytest.mark.parametrize("form", FORMS)
def test_what_leaves_gradients_as_they_were_is_not_an_edit(form: str) -> None:
    run_ranks(_inert, 2, form)


def _schedule(ddp: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def _decay(ddp: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(0.9)


def _decay_by_data(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.data.add_(parameter.data, alpha=-0.1)


def _clip_by_data(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad.data.mul_(0.5)


def _negate_by_data(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad.data.neg_()


def _reduce_again(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)


def _edit_one(ddp: Any, optimizer: Any) -> None:
    list(ddp.parameters())[2].grad.mul_(2)


def _reset_state(ddp: Any, optimizer: Any) -> None:
    inner = getattr(optimizer, "optim", optimizer)
    for state in inner.state.values():
        state["momentum_buffer"].zero_()


def _replace_group(ddp: Any, optimizer: Any) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.05}


def _take_out(ddp: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


def _clear_state(ddp: Any, optimizer: Any) -> None:
    getattr(optimizer, "optim", optimizer).state.clear()


CHANGES = {
    _schedule: r"'lr' of parameter group 0 was changed from 0.1 to 0.05 between backward and .*deferred=True",
    _decay: r"8.bias \(and 9 other parameters\) was changed between backward and .*deferred=True",
    _decay_by_data: r"8.bias \(and 9 other parameters\) was changed between backward and .*deferred=True",
    _clip_by_data: r"the gradient of .* \(and of 9 others\) was changed after backward.*deferred=True",
    _negate_by_data: r"the gradient of .* others\) was changed after backward",
    _reduce_again: r"the gradient of .* \(and of 9 others\) was changed after backward",
    _edit_one: r"the gradient of 2.weight \(and of 0 others\) was changed after backward",
    _replace_group: r"'lr' of parameter group 0 was changed from 0.1 to 0.05 between backward and .*deferred=True",
    _clear_state: r"'momentum_buffer' of the state of .* was changed from what it was to None",
    _reset_state: r"'momentum_buffer' of the state of .* was changed from what it was to something else",
}


def _with(change: Any) -> Any:
    def loop(ddp: Any, optimizer: Any, rank: int) -> None:
        for step in range(4):
            optimizer.zero_grad()
            backward(ddp, step, rank)
            if step >= 2:
                change(ddp, optimizer)
            optimizer.step()

    loop.__name__ = change.__name__
    return loop


def _changed(rank: int, world_size: int, form: str) -> None:
    for change, pattern in CHANGES.items():
        if form == "zero in forward" and change in (_decay, _decay_by_data):
            continue  # Gathers write parameters meanwhile.
        for view in (False, True):
            check_refused(form, _with(change), rank, pattern, gradient_as_bucket_view=view)


@pytest.mark.parametrize("form", INTERLEAVED)
def test_what_an_update_in_backward_cannot_see_is_an_error(form: str) -> None:
    run_ranks(_changed, 2, form)


def _parameter_taken_out(rank: int, world_size: int, form: str) -> None:
    check_refused(form, _with(_take_out), rank, r"parameters were taken out of parameter group 0 between backward")


@pytest.mark.parametrize("form", ["interleaved"])
def test_a_parameter_taken_out_between_backward_and_step_is_an_error(form: str) -> None:
    run_ranks(_parameter_taken_out, 2, form)


def _seen(rank: int, world_size: int, form: str) -> None:
    for change in CHANGES:
        check_equal(form, _with(change), rank)


@pytest.mark.parametrize("form", REST)
def test_a_deferred_step_sees_what_came_after_backward(form: str) -> None:
    """Of a clipped one, the norms that were taken in backward are not those of edited gradients."""
    run_ranks(_seen, 2, form)
