"""The parity checks themselves: each of these faults, put into the code on purpose, makes them fail."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import MLP, UNUSED, Case
from overlap import AllReduce, Bucket, OverlappedOptimizer, Stage, Step, TrainingLoopError, chain
from overlap.optim.applied import PassGradients


class _Uneven(Stage):
    """The all-reduce, to which one rank comes late: code that does not wait for it continues with half a sum."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    async def __call__(self, bucket: Bucket) -> None:
        time.sleep(0.005 * self.rank)
        await AllReduce()(bucket)


def _parity(rank: int, case: Case, fault: Callable[[], Any] | None, deferred: bool) -> None:
    make = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    batches = case.batches(rank, steps=5)
    ddp = wrap(case.model(), **case.ddp_options())
    reference = train(ddp, make(ddp.parameters()), batches)
    patches = [] if fault is None else fault()
    for patch in patches:
        patch.start()
    try:
        ddp = wrap(case.model(), **case.ddp_options())
        optimizer = OverlappedOptimizer(make(ddp.parameters()))
        chain(_Uneven(rank), Step(optimizer, deferred=deferred)).register(ddp)
        candidate = train(ddp, optimizer, batches, step_fn=overlapped_step)
    finally:
        for patch in patches:
            patch.stop()
    assert_parity(candidate, reference, what="the mutant")


def _wrong_divisor() -> list[Any]:
    return [mock.patch("overlap.hooks.engine.runtime.gradient_divisor", lambda group: group.size() + 1)]


def _dropped_wait() -> list[Any]:
    return [mock.patch("overlap.hooks.engine.executors.HostExecutor.wait", return_value=None)]


def _stale_hyperparameters() -> list[Any]:
    from overlap.optim.subset import SubsetStepper

    step = SubsetStepper._step

    def stale(self: Any, split: Any, *arguments: Any) -> Any:
        return step(self, [(place, {**members, "lr": 0.05}) for place, members in split], *arguments)

    return [mock.patch.object(SubsetStepper, "_step", stale)]


def _updates_what_no_rank_used() -> list[Any]:
    async def all_used(self: Any, bucket: Bucket, parameters: Any) -> None:
        return None

    return [mock.patch.object(Step, "_used_on_any_rank", all_used)]


def _keeps_gradients() -> list[Any]:
    return [mock.patch.object(PassGradients, "clear_applied", PassGradients.forget)]


def _updates_twice() -> list[Any]:
    return [mock.patch.object(PassGradients, "note_applied", return_value=None)]


def _skips_the_last_bucket() -> list[Any]:
    apply = Step.apply
    calls = []

    def forgetful(self: Any, layout: Any, parameters: Any, gradients: Any) -> None:
        calls.append(1)
        if len(calls) % 4:
            apply(self, layout, parameters, gradients)
        else:
            self.lifecycle.gradients.note_applied(parameters)

    return [mock.patch.object(Step, "apply", forgetful)]


FAULTS: dict[str, tuple[Callable[[], list[Any]], Case, bool]] = {
    "wrong divisor": (_wrong_divisor, MLP, False),
    "wrong divisor, deferred": (_wrong_divisor, MLP, True),
    "dropped wait": (_dropped_wait, MLP, False),
    "stale hyperparameters": (_stale_hyperparameters, MLP, False),
    "updates what no rank used": (_updates_what_no_rank_used, UNUSED, False),
    "keeps gradients": (_keeps_gradients, MLP, False),
    "keeps gradients, deferred": (_keeps_gradients, MLP, True),
    "updates twice": (_updates_twice, MLP, False),
    "skips a bucket": (_skips_the_last_bucket, MLP, False),
}


def _run(rank: int, world_size: int, name: str | None) -> str:
    fault, case, deferred = FAULTS[name] if name is not None else (None, MLP, False)
    try:
        _parity(rank, case, fault, deferred)
    except AssertionError as error:
        return str(error)
    except TrainingLoopError as error:  # What is reduced after DDP has copied it to .grad is taken for an edit.
        return f"first difference: {error}" if name == "dropped wait" else ""
    return ""


@pytest.mark.parametrize("name", FAULTS)
def test_parity_fails_for_the_fault(name: str) -> None:
    assert all("first difference" in difference for difference in run_ranks(_run, 2, name))


def test_parity_holds_without_a_fault() -> None:
    assert run_ranks(_run, 2, None) == ["", ""]
