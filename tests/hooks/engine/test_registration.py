"""Registering a stage, removing it, and copying a model that has one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from harness import assert_parity, run_ranks, train, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    ConfigurationError,
    OptimizerHookState,
    OverlappedOptimizer,
    RegistrationError,
    Step,
    UnsupportedError,
    allreduce_hook,
    chain,
    fp16_compress_hook,
    hook_then_optimizer,
    register,
)

from ..runs import SGD


def _model() -> Any:
    return wrap(MLP.model(), **MLP.ddp_options())


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(RegistrationError, match="Linear is not a DistributedDataParallel model"):
        register(nn.Linear(2, 2), AllReduce())  # type: ignore[arg-type]


def _registered_twice(rank: int, world_size: int) -> None:
    ddp = _model()
    chain(AllReduce()).register(ddp)
    with pytest.raises(RegistrationError, match=r"has chain\(AllReduce\(\)\) registered already.*remove"):
        chain(AllReduce()).register(ddp)


def test_a_second_registration_is_refused() -> None:
    run_ranks(_registered_twice, 2)


def _stage_with_a_state(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="keeps its own state"):
        register(_model(), AllReduce(), state=1)


def test_a_hooks_state_for_a_stage_is_refused() -> None:
    run_ranks(_stage_with_a_state, 2)


def _removed_twice(rank: int, world_size: int) -> None:
    registration = chain(AllReduce()).register(_model())
    registration.remove()
    registration.remove()
    assert "removed" in repr(registration)


def test_removing_twice_is_removing_once() -> None:
    run_ranks(_removed_twice, 2)


def _hook_before(rank: int, world_size: int) -> None:
    taken = _model()
    taken.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RegistrationError, match="has the communication hook allreduce_hook already"):
        chain(AllReduce()).register(taken)


def test_a_model_with_a_hook_of_another_library_is_refused() -> None:
    run_ranks(_hook_before, 2)


def _builtin_hook_before(rank: int, world_size: int) -> None:
    builtin = _model()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RegistrationError, match="communication hook"):
        chain(AllReduce()).register(builtin)


def test_a_model_with_a_builtin_hook_is_refused() -> None:
    run_ranks(_builtin_hook_before, 2)


def _in_and_out(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=9)
    reference = train(plain := _model(), SGD(plain.parameters()), batches)
    ddp = _model()
    optimizer = SGD(ddp.parameters())
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for step, batch in enumerate(batches):
        if step % 3 == 0:
            registration = chain(AllReduce()).register(ddp)
        if step % 3 == 2:
            registration.remove()
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
        optimizer.step()
        schedule.step()
        parameters = dict(ddp.module.named_parameters())
        assert_parity(parameters, reference[step].parameters, what=f"step {step}")


def test_registering_and_removing_again_and_again_trains_as_plain_ddp() -> None:
    run_ranks(_in_and_out, 2)


def _trained_with_a_chain(rank: int) -> Any:
    ddp = _model()
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    for step in range(2):
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
        optimizer.step()
    return ddp


def _copied(rank: int, world_size: int) -> None:
    ddp = _trained_with_a_chain(rank)
    copied = copy.deepcopy(ddp)
    copied(*MLP.batch(0, rank).inputs)
    assert all(p.grad is not None for p in ddp.parameters()), "the copy's forward clears nothing of the original"
    assert_parity(copied.module.state_dict(), ddp.module.state_dict(), what="a copy")
    again = OverlappedOptimizer(SGD(copied.parameters()))
    chain(AllReduce(), Step(again)).register(copied)
    copied(*MLP.batch(2, rank).inputs).sum().backward()
    again.step()


def test_a_copy_of_a_registered_model_has_nothing_registered() -> None:
    run_ranks(_copied, 2)


class _OfTwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_single, self.in_double = nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_single(x) + self.in_double(x.double()).float()


def _static_graph_of_two_dtypes(rank: int, world_size: int) -> None:
    ddp = wrap(_OfTwoDtypes(), static_graph=True)
    with pytest.raises(UnsupportedError, match=r"of torch\.float32 and torch\.float64: with static_graph"):
        chain(AllReduce()).register(ddp)


def test_a_static_graph_of_two_dtypes_is_refused() -> None:
    run_ranks(_static_graph_of_two_dtypes, 2)


_HOOKS_OF_DDP: dict[str, Callable[[Any], Any]] = {
    "allreduce_hook": lambda ddp: allreduce_hook,
    "fp16_compress_hook": lambda ddp: fp16_compress_hook,
    "hook_then_optimizer": lambda ddp: hook_then_optimizer(
        allreduce_hook, OptimizerHookState(torch.optim.SGD(ddp.parameters(), lr=0.1))
    ),
}


def _hook_on_a_static_graph_of_two_dtypes(rank: int, world_size: int, hook: str) -> None:
    ddp = wrap(_OfTwoDtypes(), static_graph=True)
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    ddp.register_comm_hook(None, _HOOKS_OF_DDP[hook](ddp))
    with pytest.raises(UnsupportedError, match=r"<hook .*>: the model has parameters of several dtypes: with static_"):
        ddp(torch.ones(2, 16)).sum().backward()
    assert all(map(torch.equal, ddp.parameters(), before))
    # The ranks' collectives still fit each other, and the module can be wrapped as the error says.
    ddp = wrap(ddp.module, find_unused_parameters=True)
    ddp.register_comm_hook(None, _HOOKS_OF_DDP[hook](ddp))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 16)).sum().backward()
        ddp.zero_grad()


@pytest.mark.parametrize("hook", _HOOKS_OF_DDP)
def test_a_hook_that_ddp_calls_refuses_a_static_graph_of_two_dtypes(hook: str) -> None:
    run_ranks(_hook_on_a_static_graph_of_two_dtypes, 2, hook)
