"""`OverlappedOptimizer` as an optimizer: its copies, its state, what it can wrap, and a part of it in backward."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from step_loops import ADAMW, BOTH_MODES, SGD, overlapped_ddp, plain_ddp, renumbered
from torch import nn

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
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
        (torch.optim.SparseAdam(nn.Linear(2, 2).parameters()), UnsupportedError, "SparseAdam works on sparse"),
        ("adam", ConfigurationError, r"expected a torch\.optim\.Optimizer, got str; make one"),
        (OverlappedOptimizer(SGD(nn.Linear(2, 2).parameters())), ConfigurationError, "already"),
    ],
    ids=["a closure", "sparse gradients", "no optimizer", "overlapped"],
)
def test_what_cannot_be_overlapped_is_refused_by_name(optimizer: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        OverlappedOptimizer(optimizer)


def _resumed_twice(rank: int, world_size: int, deferred: bool) -> None:
    batches = MLP.batches(rank, steps=9)
    ddp, optimizer = plain_ddp(MLP, ADAMW)
    reference = train(ddp, optimizer, batches)

    ddp, optimizer = plain_ddp(MLP, ADAMW)
    records = train(ddp, optimizer, batches[:3])
    model_state, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    ddp, overlapped, _ = overlapped_ddp(MLP, ADAMW, deferred=deferred)
    ddp.module.load_state_dict(model_state)
    overlapped.load_state_dict(state)
    records += renumbered(train(ddp, overlapped, batches[3:6], step_fn=overlapped_step), 3)
    model_state, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(overlapped.state_dict())
    ddp, optimizer = plain_ddp(MLP, ADAMW)
    ddp.module.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    records += renumbered(train(ddp, optimizer, batches[6:]), 6)
    # A new scheduler notes the rate that it starts from; that is not part of the update.
    for record in (*records, *reference):
        for group in record.optimizer["param_groups"]:
            group.pop("initial_lr", None)
    assert_parity(records, reference, what="plain, overlapped and plain in turn")


@BOTH_MODES
def test_training_resumes_exactly_from_plain_to_overlapped_and_back(deferred: bool) -> None:
    run_ranks(_resumed_twice, 2, deferred)


def _through_distributed_checkpoint(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ddp, overlapped, _ = overlapped_ddp(MLP, ADAMW)
    train(ddp, overlapped, MLP.batches(rank, steps=3), step_fn=overlapped_step)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(ddp, overlapped))
    ddp, fresh, _ = overlapped_ddp(MLP, ADAMW)
    set_state_dict(ddp, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_parity(fresh.state_dict()["state"], overlapped.state_dict()["state"], what="state by way of DCP")
    train(ddp, fresh, MLP.batches(rank, steps=2), step_fn=overlapped_step, min_buckets=1)


def test_torchs_distributed_checkpoint_loads_into_a_fresh_optimizer() -> None:
    run_ranks(_through_distributed_checkpoint, 2)


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


def _updated_too_early(rank: int, world_size: int) -> None:
    for implementation in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        _check_too_early(implementation)


def _check_too_early(implementation: dict[str, bool]) -> None:
    ddp = wrap(_NeedsALateWeight())
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **implementation))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    ddp(torch.ones(4, 16)).sum().backward()  # One bucket, updated when all is done.
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ddp(torch.ones(4, 16)).sum().backward()


def test_an_updated_weight_that_backward_still_needs_is_autograds_error() -> None:
    run_ranks(_updated_too_early, 2)


# A part in backward.


def _rest_in_step(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)
    ddp, optimizer = plain_ddp(MLP, SGD)
    reference = train(ddp, optimizer, batches, gradients=True)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    overlapped = OverlappedOptimizer(SGD(ddp.parameters()))
    state = OptimizerHookState(overlapped, params=list(ddp.parameters())[:3])
    register(ddp, hook_then_optimizer(allreduce_hook, state))
    candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, gradients=True)
    assert_parity(candidate, reference, what="a subset in backward, the rest in step()")


def test_an_overlapped_optimizer_updates_the_rest_in_step() -> None:
    run_ranks(_rest_in_step, 2)


def _ddp_with_three_in_backward() -> tuple[Any, list[nn.Parameter]]:
    """The model, whose first three parameters a plain optimizer updates in backward, and its other parameters."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    in_backward, rest = list(ddp.parameters())[:3], list(ddp.parameters())[3:]
    register(ddp, hook_then_optimizer(allreduce_hook, OptimizerHookState(SGD(in_backward), params=in_backward)))
    return ddp, rest


def _rest_averaged(rank: int, world_size: int) -> None:
    batch = MLP.batch(0, rank)
    reference, _ = plain_ddp(MLP, SGD)
    mean_squared_error(reference, batch).backward()
    ddp, _ = _ddp_with_three_in_backward()
    mean_squared_error(ddp, batch).backward()
    candidate, expected = (
        {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}
        for model in (ddp, reference)
    )
    assert_parity(candidate, expected, what="averaged gradients of all")


def test_with_a_plain_optimizer_all_keep_their_averaged_gradients() -> None:
    run_ranks(_rest_averaged, 2)


def test_params_must_not_be_empty() -> None:
    with pytest.raises(ConfigurationError, match="params is empty"):
        Step(SGD(nn.Linear(2, 2).parameters()), params=[])


def test_params_must_be_the_optimizers() -> None:
    with pytest.raises(ConfigurationError, match="does not have"):
        Step(SGD(nn.Linear(2, 2).parameters()), params=[nn.Parameter(torch.ones(1))])
