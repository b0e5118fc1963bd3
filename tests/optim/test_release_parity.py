"""Releasing gradients changes no bit of any update, and releases them."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from release_cases import (
    ADAMW,
    FORMS,
    SGD,
    gradients,
    held_bytes,
    is_released,
    registered,
    release_of,
    settle,
    storages,
    wrapped,
)
from torch import Tensor

from harness import assert_parity, plain_step, run_ranks, train
from harness.models import CASES, MLP, Case
from overlap import TrainingLoopError

STEPS = 6


def _step(ddp: Any, optimizer: Any, batch: Any, loss_of: Any, *, form: str) -> Tensor:
    """The loop without ``zero_grad``; looks whether there is anything to release, and whether it has gone."""
    loss: Tensor = loss_of(ddp, batch)
    loss.backward()
    assert not list(gradients(ddp)), "after backward no gradient has values"
    assert storages(ddp) and is_released(ddp)
    if "automatic" not in form:
        optimizer.step()
    settle(optimizer)
    if form.startswith("zero"):
        optimizer.consolidate_state_dict(to=None)
    return loss


def _equal(rank: int, world_size: int, form: str, cases: list[Case], options: dict[str, Any]) -> None:
    for case in cases:
        for make in (SGD, functools.partial(ADAMW, foreach=case.name != "dtypes")):
            batches = case.batches(rank, steps=STEPS)
            reference = wrapped(case, **options)
            expected = train(reference, make(reference.parameters()), batches, step_fn=plain_step)
            ddp = wrapped(case, **options)
            optimizer = registered(form, ddp, make, release_gradients=True)
            found = train(ddp, optimizer, batches, step_fn=functools.partial(_step, form=form))
            assert len(storages(ddp)) >= 2, "parity over one bucket shows little"
            what = f"{form}, {case}, {options}, rank {rank}"
            assert_parity(found, expected, what=what)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_plain_ddp(form: str) -> None:
    run_ranks(_equal, 2, form, [MLP], {})


@pytest.mark.parametrize("form", ["interleaved", "zero"])
def test_every_kind_of_model_equals_plain_ddp(form: str) -> None:
    # ZeRO refuses several dtypes in one bucket's gathers nowhere, and an empty parameter has an empty shard.
    run_ranks(_equal, 2, form, [case for case in CASES if case is not MLP], {})


@pytest.mark.parametrize("form", ["interleaved", "zero"])
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_other_kinds_of_ddp_equal_plain_ddp(form: str, options: dict[str, Any]) -> None:
    run_ranks(_equal, 2, form, [MLP], options)


def _memory_in_backward(rank: int, world_size: int, form: str) -> tuple[int, int]:
    """The most memory that buckets had before the last one came, and that of all."""
    ddp = wrapped()
    optimizer = registered(form, ddp, release_gradients=True)
    release, most = release_of(ddp), 0
    arrived = release.arrived

    def watched(bucket: Any) -> Any:
        nonlocal most
        if not bucket.is_last:
            settle_worker(ddp)
            most = max(most, held_bytes(ddp))
        return arrived(bucket)

    release.arrived = watched  # type: ignore[method-assign]
    for step in range(4):
        most = 0
        ddp(*MLP.batch(step, rank).inputs).square().mean().backward()
        optimizer.step()
    return most, sum(memory._nbytes for memory in release._memories.values())


def settle_worker(ddp: Any) -> None:
    """Wait until what DDP gave to the worker before is done."""
    import threading

    from overlap.hooks.engine.registration import registration_of

    registration = registration_of(ddp)
    assert registration is not None
    is_done = threading.Event()
    registration.runtime.executor.submit(is_done.set)
    assert is_done.wait(20)


@pytest.mark.parametrize("form", ["interleaved", "zero"])
def test_buckets_are_released_while_backward_runs(form: str) -> None:
    for most, everything in run_ranks(_memory_in_backward, 2, form):
        # Six buckets; one comes, and one or, where new parameters are gathered, two are on their way.
        assert 0 < most <= everything * 0.65


def _collected(rank: int, world_size: int) -> None:
    """Also between backward and step(), where gradients are read-only."""
    for form in FORMS:
        for options in ({}, {"release_gradients": True}):
            ddp = wrapped()
            optimizer = registered(form, ddp, **options)
            for step in range(3):
                if step and "automatic" not in form:
                    optimizer.step()
                ddp(*MLP.batch(step, rank).inputs).square().mean().backward()
            settle(optimizer)
            parameter = weakref.ref(next(ddp.parameters()))
            kept = next(ddp.parameters()).grad if options else None  # Without, it would be a view of DDP's bucket.
            del ddp, optimizer
            for _ in range(100):  # The worker may be at the end of the last backward.
                gc.collect()
                if parameter() is None:
                    break
                time.sleep(0.05)
            assert parameter() is None, f"{form}, {options}"
            if kept is not None:
                with pytest.raises(TrainingLoopError, match="of a model that no longer exists"):
                    kept.sum()
            torch.distributed.barrier()


def test_a_model_is_collected_whatever_its_gradients_are() -> None:
    run_ranks(_collected, 2)
