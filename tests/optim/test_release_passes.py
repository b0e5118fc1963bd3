"""Which buckets get memory, and when: only those that a pass is going to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from release_cases import STEPPED, is_released, registered, release_of, settle, storages, wrapped

from harness import assert_parity, run_ranks
from harness.models import MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap.optim.release import GradientRelease


def _loss(ddp: Any, step: int, rank: int, case: Case = MLP) -> torch.Tensor:
    return mean_squared_error(ddp, case.batch(step, rank))


def _train(ddp: Any, optimizer: Any, rank: int, steps: range, case: Case = MLP) -> None:
    for step in steps:
        _loss(ddp, step, rank, case).backward()
        optimizer.step()
        settle(optimizer)


def _local_gradients(rank: int, world_size: int, form: str, case: Case) -> None:
    ddp = wrapped(case)
    optimizer = registered(form, ddp, release_gradients=True)
    _train(ddp, optimizer, rank, range(3), case)
    for start in (3, 6):
        for step in range(start, start + 2):
            with ddp.no_sync():
                _loss(ddp, step, rank, case).backward()
            assert is_released(ddp), "gradients under no_sync are not in the buckets"
            assert any(parameter.grad is not None for parameter in ddp.parameters())
        _train(ddp, optimizer, rank, range(start + 2, start + 3), case)


@pytest.mark.parametrize("case", [MLP, UNUSED_ON_SOME_RANKS], ids=str)
@pytest.mark.parametrize("form", ["interleaved", "zero"])
def test_a_backward_under_no_sync_fills_no_bucket(form: str, case: Case) -> None:
    run_ranks(_local_gradients, 2, form, case)


def _synchronized_after_all(rank: int, world_size: int) -> None:
    """Forwards of which the registration is not told, and others between a forward and its backward."""

    def called_directly(ddp: Any, step: int) -> torch.Tensor:
        batch = MLP.batch(step, rank)
        return torch.nn.functional.mse_loss(ddp.forward(*batch.inputs), batch.target)

    def another_between(ddp: Any, step: int) -> torch.Tensor:
        loss = _loss(ddp, step, rank)
        with torch.no_grad():
            _loss(ddp, step + 1, rank)
        return loss

    def local_between(ddp: Any, step: int) -> torch.Tensor:
        loss = _loss(ddp, step, rank)
        with ddp.no_sync():
            _loss(ddp, step + 1, rank)
        return loss

    def module_between(ddp: Any, step: int) -> torch.Tensor:
        torch.autograd.grad(ddp.module(*MLP.batch(step, rank).inputs).sum(), list(ddp.parameters()))
        return _loss(ddp, step, rank)

    losses: dict[str, Callable[[Any, int], torch.Tensor]] = {
        each.__name__: each for each in (called_directly, another_between, local_between, module_between)
    }
    for name, loss in losses.items():
        found = []
        for options in ({}, {"release_gradients": True}):
            ddp = wrapped()
            optimizer = registered("interleaved", ddp, **options)
            for step in range(5):
                loss(ddp, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([parameter.detach().clone() for parameter in ddp.parameters()])
        assert is_released(ddp), name
        assert_parity(found[1], found[0], what=name)


def test_whatever_forward_a_synchronized_backward_has_its_buckets_are_filled() -> None:
    run_ranks(_synchronized_after_all, 2)


def _second_pass(rank: int, world_size: int, form: str) -> None:
    ddp = wrapped()
    optimizer = registered(form, ddp, release_gradients=True)
    _train(ddp, optimizer, rank, range(1))
    (first,) = storages(ddp)
    filled: list[int] = []
    arrived = GradientRelease.arrived

    def watched(self: GradientRelease, bucket: Any) -> Any:
        given = arrived(self, bucket)
        filled.append(first.nbytes())
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientRelease, "arrived", watched)
        _train(ddp, optimizer, rank, range(1, 2))
    assert len(filled) >= 3 and not any(filled), "DDP has let it go"
    assert len(release_of(ddp)._memories) == len(filled)


@pytest.mark.parametrize("form", STEPPED)
def test_the_bucket_of_the_first_pass_stays_empty(form: str) -> None:
    run_ranks(_second_pass, 2, form)
