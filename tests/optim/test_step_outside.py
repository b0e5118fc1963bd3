"""Gradients of another loss, and those that a loop without zero_grad() leaves outside of the model."""

from typing import Any

import pytest
import torch
from step_loops import SGD, backward, registered
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_equal_ranks, assert_parity, on_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Join, OverlappedOptimizer, Step, TrainingLoopError, chain


def _model() -> tuple[Any, nn.Linear]:
    torch.manual_seed(0)
    model = MLP.model()
    model.ignored = nn.Parameter(torch.ones(16))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored"])
    return wrap(model, **MLP.ddp_options()), nn.Linear(16, 16)


@on_ranks(2)
def test_what_step_applies_outside_of_the_model_is_cleared_by_it(rank: int, world_size: int) -> None:
    for deferred in (False, True):
        (reference, their_head), (ddp, head) = _model(), _model()
        plain = SGD([*reference.parameters(), *their_head.parameters()])
        optimizer = OverlappedOptimizer(SGD([*ddp.parameters(), *head.parameters()]))
        chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
        for step in range(6):
            for model, outer in ((reference, their_head), (ddp, head)):
                batch = MLP.batch(step, 0)  # The same on every rank, so that what DDP does not average is equal.
                if step == 3:  # Without the model.
                    outer(batch.inputs[0]).square().mean().backward()
                    continue
                hidden = model(*batch.inputs)
                out = outer(hidden) * model.module.ignored
                out.square().mean().backward()
            optimizer.step()
            plain.step()
            plain.zero_grad()
        assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what="the model")
        assert_parity(head.state_dict(), their_head.state_dict(), what="outside")


def _under_join(rank: int, form: str, *, discards: bool = False) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = registered(form, ddp)
    with Join([ddp, optimizer]):
        for step in range(3 + rank):
            with optimizer.skip_update():
                backward(ddp, step, rank)
            if discards:
                optimizer.zero_grad()
            optimizer.step()
    assert_equal_ranks(ddp.parameters())


@on_ranks(2)
def test_a_backward_of_another_loss_under_join(rank: int, world_size: int) -> None:
    """tests/optim/test_remedies.py has those of a loop without it."""
    for form in ("interleaved", "zero deferred"):
        _under_join(rank, form)
    with pytest.raises(TrainingLoopError, match="under Join a backward cannot be discarded"):
        _under_join(rank, "interleaved", discards=True)
    with pytest.raises(TrainingLoopError, match=r"skip_update\(\) under Join.*deferred=True"):
        _under_join(rank, "zero")
