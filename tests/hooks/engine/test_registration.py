"""Registering a stage, removing it, and copying a model that has one."""

import copy
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from harness import assert_parity, on_ranks, train, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    ClipGradNorm,
    ConfigurationError,
    OverlappedOptimizer,
    PeerError,
    Registration,
    RegistrationError,
    Step,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    chain,
    register,
)

from ..runs import SGD


def _model() -> Any:
    return wrap(MLP.model(), **MLP.ddp_options())


@on_ranks(1)
def test_a_method_by_a_former_name_is_refused(rank: int, world_size: int) -> None:
    for old, new in (("placed", "check_position"), ("passed", "output_bucket")):
        stage = type("Own", (AllReduce,), {old: lambda self, *given: None})()
        ddp = _model()
        with pytest.raises(ConfigurationError, match=rf"^Own\.{old} is never called: rename it to {new}$"):
            chain(stage).register(ddp)
        chain(AllReduce()).register(ddp)


class _OfTwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_single, self.in_double = nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_single(x) + self.in_double(x.double()).float()


def _refusals(rank: int) -> None:
    with_hook, with_builtin, registered = _model(), _model(), _model()
    with_hook.register_comm_hook(None, default_hooks.allreduce_hook)
    with_builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    chain(AllReduce()).register(registered)
    from torch.distributed.optim import _apply_optimizer_in_backward

    in_backward = _model()
    _apply_optimizer_in_backward(torch.optim.SGD, in_backward.parameters(), {"lr": 0.1})
    named = r"of torch\.float32 and torch\.float64: with static_graph"
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        (nn.Linear(2, 2), None, RegistrationError, "Linear is not a DistributedDataParallel model"),
        (registered, None, RegistrationError, r"has chain\(AllReduce\(\)\) registered already.*remove"),
        (_model(), 1, ConfigurationError, "keeps its own state"),
        (with_hook, None, RegistrationError, "has the communication hook allreduce_hook already"),
        (with_builtin, None, RegistrationError, "communication hook"),
        (in_backward, None, RegistrationError, r"_apply_optimizer_in_backward.*leave it out, and use chain"),
        (wrap(_OfTwoDtypes(), static_graph=True), None, UnsupportedError, named),
    ]
    for model, state, error, message in refused:
        with pytest.raises(error, match=message):
            register(model, chain(AllReduce()), state)


def _hook_on_a_static_graph_of_two_dtypes(rank: int) -> None:
    ddp = wrap(_OfTwoDtypes(), static_graph=True)
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(UnsupportedError, match=r"<hook .*>: the model has parameters of several dtypes: with static_"):
        ddp(torch.ones(2, 16)).sum().backward()
    # The ranks' collectives still fit each other, and the module can be wrapped as the error says.
    ddp = wrap(ddp.module, find_unused_parameters=True)
    ddp.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        ddp(torch.ones(2, 16)).sum().backward()


def _in_and_out(rank: int) -> None:
    """Registering and removing again and again trains as plain DDP."""
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
            registration.remove()  # Does nothing.
            assert "removed" in repr(registration) and not ddp._forward_hooks
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
        optimizer.step()
        schedule.step()
        parameters = dict(ddp.module.named_parameters())
        assert_parity(parameters, reference[step].parameters, what=f"step {step}")


def _trained_with_a_chain(rank: int) -> Any:
    ddp = _model()
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    for step in range(2):
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
        optimizer.step()
    return ddp


def _copied(rank: int) -> None:
    """A copy of a registered model has nothing registered."""
    ddp = _trained_with_a_chain(rank)
    copied = copy.deepcopy(ddp)
    copied(*MLP.batch(0, rank).inputs)
    assert all(p.grad is not None for p in ddp.parameters()), "the copy's forward clears nothing of the original"
    assert_parity(copied.module.state_dict(), ddp.module.state_dict(), what="a copy")
    again = OverlappedOptimizer(SGD(copied.parameters()))
    chain(AllReduce(), Step(again)).register(copied)
    copied(*MLP.batch(2, rank).inputs).sum().backward()
    again.step()


@on_ranks(2)
def test_models_that_cannot_take_a_chain_chains_in_and_out_and_copies(rank: int, world_size: int) -> None:
    for scenario in (_refusals, _hook_on_a_static_graph_of_two_dtypes, _in_and_out, _copied):
        scenario(rank)


@on_ranks(2, group_timeout_s=12)
def test_a_block_reports_what_the_loop_raises_and_removes_the_registration(rank: int, world_size: int) -> None:
    ddp = _model()
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    stage = chain(AllReduce(), Step(optimizer, deferred=True))

    def train(step: int) -> None:
        ddp(*MLP.batch(step, rank).inputs).square().sum().backward()
        optimizer.step()

    def run() -> None:
        with stage.register(ddp) as registration:
            for step in range(4):
                if (rank, step) == (1, 2):
                    raise ValueError("the dog ate it")
                train(step)
            assert registration.is_active

    start_s = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else PeerError, match="the dog ate it"):
        run()
    assert time.monotonic() - start_s < 6
    with stage.register(ddp) as registration:
        train(2)
    assert not registration.is_active


class _DetachesLate(AllReduce):
    """Its first ``detach`` raises."""

    calls = 0

    def detach(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")


@on_ranks(2)
def test_a_block_is_left_whatever_a_stage_raises_then_with_the_error_of_the_loop() -> None:
    threads = threading.active_count()
    ddp = wrap(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))

    def run(registration: Registration, error: Exception | None) -> None:
        with registration:
            ddp(torch.ones(2, 512)).sum().backward()
            if error is not None:
                raise error

    left = r"when the block was left, this was raised, too: ValueError: not yet"
    cases = ((KeyError("the loop's own"), KeyError, left), (None, ValueError, r"raised by _DetachesLate\(\) when"))
    for error, raises, note in cases:
        late, clip = _DetachesLate(), ClipGradNorm(1.0)
        registration = chain(late, clip).register(ddp)
        assert threading.active_count() == threads + 1
        with pytest.raises(raises) as raised:
            run(registration, error)
        assert re.match(note, raised.value.__notes__[-1])
        assert not registration.is_active and clip.context is None and late.calls == 1
        registration.remove()
        registration.remove()
        assert late.calls == 2
        deadline_s = time.monotonic() + 5
        while threading.active_count() > threads and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert threading.active_count() == threads


@on_ranks(2)
def test_a_block_is_left_after_a_failed_gather_with_the_error_of_the_loop() -> None:
    ddp = wrap(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), bucket_cap_mb=1)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)

    def fails(shards: Any, group: Any) -> Any:
        raise RuntimeError("injected")

    def run() -> None:
        with chain(ZeroStep(zero, gather="forward")).register(ddp):
            zero.updates[0].gathering = fails  # type: ignore[attr-defined]
            ddp(torch.ones(2, 512)).sum().backward()
            zero.step()
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own") as raised:
        run()
    assert "RuntimeError: injected" in raised.value.__notes__[-1]
