"""`OverlappedOptimizer` as an optimizer: its copies, its state, what it can wrap, and a part of it in backward."""

import copy
import functools
import pickle
import time
from typing import Any

import pytest
import torch
from step_loops import ADAMW, SGD, overlapped_ddp, plain_ddp
from torch import nn

from harness import assert_parity, on_ranks, overlapped_step, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    OptimizerHookState,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    allreduce_hook,
    chain,
    hook_then_optimizer,
    register,
)


def test_a_copy_has_the_state_and_the_defaults_of_the_original() -> None:
    layer = nn.Linear(2, 2)
    plain = ADAMW(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    overlapped = OverlappedOptimizer(plain)
    assert "AdamW" in repr(overlapped)
    for other in (copy.deepcopy(overlapped), pickle.loads(pickle.dumps(overlapped))):
        assert_parity(other.state_dict(), overlapped.state_dict(), what="a copy's state")
        assert other.defaults == overlapped.defaults


@pytest.mark.parametrize(
    ("optimizer", "error", "match"),
    [
        (torch.optim.LBFGS(nn.Linear(2, 2).parameters()), UnsupportedError, "LBFGS evaluates the model again"),
        ("adam", ConfigurationError, r"expected a torch\.optim\.Optimizer, got str; make one"),
        (OverlappedOptimizer(SGD(nn.Linear(2, 2).parameters())), ConfigurationError, "already"),
    ],
    ids=["a closure", "no optimizer", "overlapped"],
)
def test_what_cannot_be_overlapped_is_refused_by_name(optimizer: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        OverlappedOptimizer(optimizer)


@on_ranks(2)
def test_torchs_distributed_checkpoint_loads_into_a_fresh_optimizer(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ddp, overlapped, _ = overlapped_ddp(MLP, ADAMW)
    train(ddp, overlapped, MLP.batches(rank, steps=3), step_fn=overlapped_step)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(ddp, overlapped))
    ddp, fresh, _ = overlapped_ddp(MLP, ADAMW)
    set_state_dict(ddp, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_parity(fresh.state_dict()["state"], overlapped.state_dict()["state"], what="state by way of DCP")
    train(ddp, fresh, MLP.batches(rank, steps=2), step_fn=overlapped_step, min_buckets=1)


# In the middle of backward.


class _NeedsALateWeight(nn.Module):
    """`late` gets its gradient first, but the backward of an earlier product still needs its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.early(x) @ self.late.weight.detach()
        hidden.register_hook(lambda grad: time.sleep(0.2))  # Time enough for the update of `late`.
        return self.late(self.middle(hidden))


@on_ranks(2)
def test_an_updated_weight_that_backward_still_needs_is_autograds_error(rank: int, world_size: int) -> None:
    for implementation in ({"foreach": True}, {"fused": True}):
        ddp = wrap(_NeedsALateWeight())
        optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **implementation))
        chain(AllReduce(), Step(optimizer)).register(ddp)
        ddp(torch.ones(4, 16)).sum().backward()  # One bucket, updated when all is done.
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ddp(torch.ones(4, 16)).sum().backward()


# A part of the model.


@on_ranks(2)
def test_with_a_plain_optimizer_all_keep_their_averaged_gradients(rank: int, world_size: int) -> None:
    batch = MLP.batch(0, rank)
    reference, _ = plain_ddp(MLP, SGD)
    mean_squared_error(reference, batch).backward()
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    in_backward = list(ddp.parameters())[:3]
    register(ddp, hook_then_optimizer(allreduce_hook, OptimizerHookState(SGD(in_backward), params=in_backward)))
    mean_squared_error(ddp, batch).backward()
    candidate, expected = ([p.grad.clone() for p in model.parameters()] for model in (ddp, reference))
    assert_parity(candidate, expected, what="averaged gradients of all")


def test_params_must_be_the_optimizers() -> None:
    layer = nn.Linear(2, 2)
    for params in ([], [layer.weight]):
        with pytest.raises(ConfigurationError, match="params are not the parameters of this SGD"):
            OptimizerHookState(SGD(layer.parameters()), params=params)


class _Arguments(torch.optim.SGD):
    """Takes more than a closure."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(factor)
        return super().step(closure)


@on_ranks(2)
def test_other_arguments_of_step_reach_a_deferred_step(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=4)

    def halved(ddp: Any, optimizer: Any, batch: Any, loss_of: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(ddp, batch)
        loss.backward()
        optimizer.step(factor=0.5)
        return loss

    make = functools.partial(_Arguments, lr=0.1)
    reference = train(*plain_ddp(MLP, make), batches, step_fn=halved)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
    assert_parity(train(ddp, overlapped, batches, step_fn=halved), reference, what="step(factor=0.5), deferred")
