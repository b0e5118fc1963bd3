"""What a loop changes between backward and step(), and what it does with two models at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_forms import INTERLEAVED, check_equal, check_refused
from step_loops import ADAMW, SGD

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, TrainingLoopError, chain


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _replace(ddp: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad = torch.nan_to_num(parameter.grad) * 0.5


def _evaluate(ddp: Any) -> None:
    ddp(*MLP.batch(7, 0).inputs)  # With gradients enabled; the first one lets DDP rebuild its buckets.


def _deferred(rank: int, world_size: int, between: Callable[[Any], None], view: bool) -> None:
    reference, ddp = (wrap(MLP.model(), gradient_as_bucket_view=view, **MLP.ddp_options()) for _ in range(2))
    overlapped = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(AllReduce(), Step(overlapped, deferred=True)).register(ddp)
    for model, optimizer in ((reference, ADAMW(reference.parameters())), (ddp, overlapped)):
        for step in range(4):
            _backward(model, step, rank)
            if step != 2:
                between(model)
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=between.__name__)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket views"])
@pytest.mark.parametrize("between", [_replace, _evaluate], ids=lambda f: f.__name__.lstrip("_"))
def test_a_deferred_step_takes_gradients_as_the_loop_left_them(between: Callable[[Any], None], view: bool) -> None:
    run_ranks(_deferred, 2, between, view)


def _clip_for_logging(ddp: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))


def _schedule(ddp: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _decay(ddp: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(0.9)


def _clip_by_data(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad.data.mul_(0.5)


def _reduce_again(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)


def _set(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)


def _clear(ddp: Any, optimizer: Any) -> None:
    ddp.zero_grad()


def _zero(ddp: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def _reset_state(ddp: Any, optimizer: Any) -> None:
    for state in getattr(optimizer, "optim", optimizer).state.values():
        state["momentum_buffer"].zero_()


def _replace_group(ddp: Any, optimizer: Any) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.05}


def _add_group(ddp: Any, optimizer: Any) -> None:
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


REFUSED = {
    _schedule: "'lr' of parameter group 0 was changed from 0.1 to 0.05 between backward and .*deferred=True",
    _decay: r"\(and 9 other parameters\) was changed between backward and .*deferred=True",
    _clip_by_data: "the gradient of 0.weight .*deferred=True",
    _reduce_again: "the gradient of 0.weight .*deferred=True",
    _set: r"the gradient of \S+ \(and 9 others\) .*deferred=True",
    _clear: r"the gradient of \S+ \(and 9 others\) .*deferred=True",
    _zero: r"zero_grad\(\) between backward and .*deferred=True",
    _replace_group: "'lr' of parameter group 0 was changed from 0.1 to 0.05 between backward and .*deferred=True",
}


def _with(change: Any) -> Any:
    def loop(ddp: Any, optimizer: Any, rank: int) -> None:
        for step in range(4):
            optimizer.zero_grad()
            _backward(ddp, step, rank)
            if step >= 2:
                change(ddp, optimizer)
            optimizer.step()

    loop.__name__ = change.__name__
    return loop


def _refused(rank: int, world_size: int, form: str) -> None:
    for change, pattern in REFUSED.items():
        if form != "zero in forward" or change is not _decay:  # Gathers write parameters meanwhile.
            check_refused(form, _with(change), rank, pattern)
    if form == "interleaved":
        check_equal(form, _with(_add_group), rank)


@pytest.mark.parametrize("form", INTERLEAVED)
def test_what_an_update_in_backward_cannot_see_is_an_error_and_the_model_trains_on(form: str) -> None:
    run_ranks(_refused, 2, form)


def _seen(rank: int, world_size: int, form: str) -> None:
    for change in (*REFUSED, _clip_for_logging, _reset_state, _add_group):
        check_equal(form, _with(change), rank)


@pytest.mark.parametrize("form", ["deferred", "clipped"])
def test_a_deferred_step_sees_what_came_after_backward(form: str) -> None:
    """Of a clipped one, the norms that were taken in backward are not those of edited gradients."""
    run_ranks(_seen, 2, form)


def _two_models(rank: int, world_size: int) -> None:
    models = [wrap(MLP.model(), **MLP.ddp_options()) for _ in range(4)]
    plain = SGD([p for model in models[:2] for p in model.parameters()])
    overlapped = OverlappedOptimizer(SGD([p for model in models[2:] for p in model.parameters()]))
    for model in models[2:]:
        chain(AllReduce(), Step(overlapped)).register(model)
    for (first, second), optimizer in ((models[:2], plain), (models[2:], overlapped)):
        _backward(first, 0, rank)
        optimizer.step()
        _backward(second, 1, rank)
        if optimizer is overlapped:
            with pytest.raises(TrainingLoopError, match=r"zero_grad\(\) between backward and"):
                optimizer.zero_grad()
        else:
            first.zero_grad()
        optimizer.step()
    for ours, theirs in zip(models[2:], models[:2], strict=True):
        assert_parity(ours.module.state_dict(), theirs.module.state_dict(), what="a refused zero_grad over two models")


def test_a_zero_grad_that_one_model_refuses_leaves_the_other_as_it_was() -> None:
    run_ranks(_two_models, 2)
