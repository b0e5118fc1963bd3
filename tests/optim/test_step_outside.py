"""Gradients that a loop without zero_grad() leaves: of parameters outside the model, ignored by DDP, or unused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_forms import SGD, backward, registered
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Join, OverlappedOptimizer, Step, TrainingLoopError, chain
from overlap.errors import RegistrationError

FORMS = ("interleaved", "deferred")


def _model() -> tuple[Any, nn.Linear]:
    torch.manual_seed(0)
    model = MLP.model()
    model.ignored = nn.Parameter(torch.ones(16))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored"])
    return wrap(model, **MLP.ddp_options()), nn.Linear(16, 16)


def _outside(rank: int, world_size: int, form: str) -> None:
    (reference, their_head), (ddp, head) = _model(), _model()
    plain = SGD([*reference.parameters(), *their_head.parameters()])
    optimizer = OverlappedOptimizer(SGD([*ddp.parameters(), *head.parameters()]))
    chain(AllReduce(), Step(optimizer, deferred=form == "deferred")).register(ddp)
    for step in range(6):
        if step == 3:
            optimizer.zero_grad()  # No forward comes to clear what was applied.
        for model, outer in ((reference, their_head), (ddp, head)):
            batch = MLP.batch(step, 0)  # The same on every rank, so that what DDP does not average is equal.
            if step == 3:  # Without the model: what step() applies now is cleared by the next forward, too.
                outer(batch.inputs[0]).square().mean().backward()
                continue
            hidden = model(*batch.inputs)
            out = outer(hidden) * model.module.ignored
            out.square().mean().backward()
        optimizer.step()
        plain.step()
        if step < 5:
            plain.zero_grad()
    reference.zero_grad()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=form)
    assert_parity(head.state_dict(), their_head.state_dict(), what=f"{form}, outside")
    for outer, made in ((head, optimizer), (their_head, plain)):
        outer(batch.inputs[0]).sum().backward()  # Adds to what was applied, which is the loop's after step().
        made.step()
    assert_parity(head.state_dict(), their_head.state_dict(), what=f"{form}, added to after step()")


@pytest.mark.parametrize("form", FORMS)
def test_what_step_applied_outside_of_the_model_is_cleared_by_its_next_forward(form: str) -> None:
    run_ranks(_outside, 2, form)


def _second_model(rank: int, world_size: int) -> None:
    model = MLP.model()
    optimizer = OverlappedOptimizer(SGD(model.parameters()))
    first = DistributedDataParallel(model, bucket_cap_mb=1e-3)
    registration = chain(AllReduce(), Step(optimizer, deferred=True)).register(first)
    second = DistributedDataParallel(model, bucket_cap_mb=1e-3)
    with pytest.raises(RegistrationError, match=r"another DistributedDataParallel of the same module.*remove\(\)"):
        chain(AllReduce(), Step(optimizer, deferred=True)).register(second)
    registration.remove()
    chain(AllReduce(), Step(optimizer, deferred=True)).register(second)
    before = model[0].weight.detach().clone()
    backward(second, 0, rank)
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_a_second_registration_of_the_same_parameters_is_refused() -> None:
    run_ranks(_second_model, 2)


def _scaled_under_join(rank: int, world_size: int) -> None:
    for form in ("deferred", "zero deferred"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer, scaler = registered(form, ddp), torch.amp.GradScaler("cpu")

        def loop(ddp: Any = ddp, optimizer: Any = optimizer, scaler: Any = scaler) -> None:
            with Join([ddp, optimizer]):
                for step in range(2 + rank):
                    scaler.scale(ddp(*MLP.batch(step, rank).inputs).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()

        with pytest.raises(
            TrainingLoopError, match=r"GradScaler decides after backward.*leave the scaler out under Join"
        ):
            loop()


def test_a_grad_scaler_under_join_is_refused_on_every_rank() -> None:
    run_ranks(_scaled_under_join, 2)
