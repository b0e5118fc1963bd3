"""Passes with nothing to hide: on autograd's thread, one update for all buckets, the same parameters bit for bit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import DTYPES, FROZEN, MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import (
    AllReduce,
    Bucket,
    OverlappedOptimizer,
    Stage,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks import Role
from overlap.hooks.engine.executors import HostExecutor
from overlap.hooks.engine.nothing_to_hide import has_nothing_to_hide, limit_replaced
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.engine.worker import Worker
from overlap.optim.subset import SubsetStepper

LATE = {"OVERLAP_SMALL_MODEL_BYTES": str(2**20)}
STEPS = 6

make_adamw = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def _replicated(ddp: Any, **form: Any) -> Any:
    optimizer = OverlappedOptimizer(make_adamw(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, **form)).register(ddp)
    return optimizer


def _sharded(ddp: Any, **form: Any) -> Any:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.1, overlap_with_ddp=True
    )
    chain(ZeroStep(zero, **form)).register(ddp)
    return zero


FORMS: dict[str, Callable[[Any], Any]] = {
    "interleaved": _replicated,
    "deferred": functools.partial(_replicated, deferred=True),
    "sharded": _sharded,
    "sharded, gather in forward": functools.partial(_sharded, gather="forward"),
}


def _trained(ddp: Any, optimizer: Any, batches: Any) -> dict[str, Any]:
    """The losses of all steps, and the parameters at the end."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(overlapped_step(ddp, optimizer, batch, mean_squared_error).detach())
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()
    return {"losses": losses, **{name: value.detach().clone() for name, value in ddp.module.named_parameters()}}


def _equals_plain_ddp(rank: int, world_size: int, name: str, bucket_view: bool) -> int:
    options = {**MLP.ddp_options(), "gradient_as_bucket_view": bucket_view}
    batches = MLP.batches(rank, steps=STEPS)
    ddp = wrap(MLP.model(), **options)
    reference = _trained(ddp, make_adamw(ddp.parameters()), batches)
    ddp = wrap(MLP.model(), **options)
    submit = Worker.submit
    with mock.patch.object(Worker, "submit", autospec=True, side_effect=submit) as submitted:
        candidate = _trained(ddp, FORMS[name](ddp), batches)
    assert_parity(candidate, reference, what=name)
    return submitted.call_count


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_late_pass_equals_plain_ddp(name: str, bucket_view: bool) -> None:
    jobs = run_ranks(_equals_plain_ddp, 2, name, bucket_view, env=LATE)
    # Before DDP compares its buckets the ranks meet there, once.
    between = STEPS if "forward" in name else 0
    assert jobs == [between + 1] * 2, "only what runs between passes has the worker"


def _updates(rank: int, world_size: int) -> int:
    step = SubsetStepper.step
    with mock.patch.object(SubsetStepper, "step", autospec=True, side_effect=step) as parts:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        train(ddp, _replicated(ddp), MLP.batches(rank, steps=STEPS), step_fn=overlapped_step)
        return parts.call_count


def test_a_late_pass_is_updated_at_once() -> None:
    assert run_ranks(_updates, 2, env=LATE) == [STEPS] * 2
    # The first pass has one bucket.
    assert run_ranks(_updates, 2)[0] >= 1 + 3 * (STEPS - 1)


class _Labels:
    """An observer that notes what passes launch."""

    def __init__(self) -> None:
        self.launched_in: dict[int, list[str]] = {}

    def launched(self, subject: Any, label: str, operation: Any) -> None:
        if operation.label != "whole pass" and subject.step >= 0:
            self.launched_in.setdefault(subject.step, []).append(operation.label)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _exchanges(rank: int, world_size: int, name: str) -> list[list[str]]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = FORMS[name](ddp)
    registration = registration_of(ddp)
    assert registration is not None
    registration.observer = labels = _Labels()  # type: ignore[assignment]
    for batch in MLP.batches(rank, steps=STEPS):
        overlapped_step(ddp, zero, batch, mean_squared_error)
    zero.wait()
    return list(labels.launched_in.values())


@pytest.mark.parametrize("name", ["sharded", "sharded, gather in forward"])
def test_a_late_pass_is_exchanged_at_once(name: str) -> None:
    assert run_ranks(_exchanges, 2, name, env=LATE) == [[["reduce_scatter", "all_gather"]] * STEPS] * 2
    assert len(run_ranks(_exchanges, 2, name)[0][-1]) >= 2 * 3


def _sharded_late_passes(rank: int, world_size: int, case: Case) -> list[Any]:
    """By element and by parameter, with parameters of the model that the optimizer averages alone."""
    found = []
    for options in ({}, {"partition": "parameter"}):
        ddp = wrap(case.model(), **case.ddp_options())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **options)
        chain(*([AllReduce()] if options else []), ZeroStep(zero)).register(ddp)
        for batch in case.batches(rank, steps=STEPS):
            mean_squared_error(ddp, batch).backward()
            zero.step()
        found.append([parameter.detach().clone() for parameter in ddp.parameters()])
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [UNUSED_ON_SOME_RANKS, FROZEN, DTYPES], ids=str)
def test_a_late_sharded_pass_is_as_another(case: Case, world_size: int) -> None:
    late, usual = (run_ranks(_sharded_late_passes, world_size, case, env=env) for env in (LATE, {}))
    assert_parity(late, usual, what=f"{case}, late")


class _Uneven(Stage):
    """The all-reduce, to which one rank comes late."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    async def __call__(self, bucket: Bucket) -> None:
        if self.rank and bucket.is_last:
            time.sleep(0.01)
        await AllReduce()(bucket)


def _without_waiting(rank: int, world_size: int) -> bool:
    batches = MLP.batches(rank, steps=STEPS)
    records = []
    for is_faulty in (False, True):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(make_adamw(ddp.parameters()))
        chain(_Uneven(rank), Step(optimizer)).register(ddp)
        with mock.patch.object(HostExecutor, "wait", return_value=None) if is_faulty else mock.MagicMock():
            try:
                records.append(train(ddp, optimizer, batches, step_fn=overlapped_step))
            except TrainingLoopError:  # What came after the update was taken for an edit.
                assert is_faulty
                return True
    try:
        assert_parity(records[1], records[0], what="without waiting")
    except AssertionError:
        return True
    return False


def test_a_late_pass_waits_for_its_collectives() -> None:
    assert any(run_ranks(_without_waiting, 2, env=LATE)), "the check above must be able to fail"


class _SeesNewParameters(Stage):
    """A transform after the update."""

    role = Role.TRANSFORM

    def __init__(self, before: dict[int, torch.Tensor]) -> None:
        self.before = before
        self.seen: list[bool] = []

    async def __call__(self, bucket: Bucket) -> None:
        self.seen += [not torch.equal(self.before[id(p)], p) for p in bucket.parameters]


def _with_a_stage_after_the_update(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(make_adamw(ddp.parameters()))
    last = _SeesNewParameters({})
    chain(AllReduce(), Step(optimizer), last).register(ddp)
    for step in range(3):
        last.before = {id(p): p.detach().clone() for p in ddp.parameters()}
        ddp(*MLP.batch(step, rank).inputs).square().sum().backward()
        optimizer.step()
    assert len(last.seen) == 3 * len(list(ddp.parameters())) and all(last.seen)


def test_a_stage_after_the_update_sees_new_parameters() -> None:
    run_ranks(_with_a_stage_after_the_update, 2, env=LATE)


def test_which_passes_are_late() -> None:
    with limit_replaced(1000):
        assert has_nothing_to_hide(1000, is_only_bucket=False)
        assert not has_nothing_to_hide(1001, is_only_bucket=False)
        assert has_nothing_to_hide(10**9, is_only_bucket=True), "no bucket could ride beside it"
    with limit_replaced(0):
        assert not has_nothing_to_hide(1, is_only_bucket=True)


def _under_autocast(rank: int, world_size: int) -> None:
    losses: dict[str, list[torch.Tensor]] = {}
    for way in ("plain", "overlapped"):
        ddp = wrap(MLP.model())
        # Its step multiplies matrices, which autocast would do in bfloat16.
        optimizer: Any = torch.optim.Adafactor(ddp.parameters(), lr=0.05)
        if way == "overlapped":
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), Step(optimizer)).register(ddp)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                ddp(*MLP.batch(step, rank).inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[way] = [parameter.detach().clone() for parameter in ddp.parameters()]
    assert_parity(losses["overlapped"], losses["plain"], what="Adafactor")


@pytest.mark.parametrize("env", [{}, LATE], ids=["worker", "late"])
def test_a_backward_under_autocast_does_not_have_the_update_under_it(env: dict[str, str]) -> None:
    run_ranks(_under_autocast, 2, env=env)
