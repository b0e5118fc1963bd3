"""Saving and loading local SGD."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from local_loops import local, run, sgd

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM
from overlap import ConfigurationError
from overlap.optim.local_sgd import LocalSGD

STEPS = 16
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
BUILD = functools.partial(LocalSGD, period=3, start_step=3, overlap=2, outer=OUTER, fragments=2)


def _saved(rank: int, stop: int) -> dict[str, Any]:
    """Model and optimizer after ``stop`` steps, as a file holds them."""
    _, made, ddp = local(BATCH_NORM, rank, steps=stop, build=BUILD)
    buffer = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "optimizer": made.state_dict()}, buffer)
    loaded: dict[str, Any] = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert (loaded["optimizer"]["local_sgd"]["flight"] is not None) == (stop == 9)
    return loaded


def _resume(rank: int, world_size: int, stop: int) -> None:
    whole, _, _ = local(BATCH_NORM, rank, steps=STEPS, build=BUILD)
    saved = _saved(rank, stop)
    fresh = wrap(BATCH_NORM.model(seed=5), **BATCH_NORM.ddp_options())
    optimizer = sgd(fresh.parameters())
    resumed = BUILD(fresh, optimizer)
    fresh.module.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups is optimizer.param_groups and resumed.step_count == stop
    rest = run(BATCH_NORM, rank, range(stop, STEPS), fresh, resumed)
    assert_parity(rest, whole[stop:], what=f"resumed after step {stop}")


@pytest.mark.parametrize("stop", [2, 9, 11], ids=["before local SGD", "with a pending average", "within a round"])
def test_resume_is_exact(stop: int) -> None:
    run_ranks(_resume, 2, stop)


def _plain_loads(rank: int, world_size: int) -> None:
    sgd(BATCH_NORM.model().parameters()).load_state_dict(_saved(rank, 2)["optimizer"])


def test_a_plain_optimizer_loads_the_state() -> None:
    run_ranks(_plain_loads, 2)


def _other_fragments(rank: int, world_size: int) -> None:
    saved = _saved(rank, 2)
    other = wrap(BATCH_NORM.model())
    with pytest.raises(ConfigurationError, match="another number of fragments"):
        LocalSGD(other, sgd(other.parameters()), 3).load_state_dict(saved["optimizer"])


def test_a_state_with_other_fragments_is_refused() -> None:
    run_ranks(_other_fragments, 2)


def _no_outer(rank: int, world_size: int) -> None:
    saved = _saved(rank, 2)
    other = wrap(BATCH_NORM.model())
    with pytest.raises(ConfigurationError, match="saved with an outer optimizer, and this one has none"):
        LocalSGD(other, sgd(other.parameters()), 3, fragments=2).load_state_dict(saved["optimizer"])


def test_a_state_with_an_outer_optimizer_is_refused_without_one() -> None:
    run_ranks(_no_outer, 2)


def _restart(rank: int, world_size: int) -> None:
    _, made, _ = local(BATCH_NORM, rank, steps=9, build=BUILD)
    with pytest.warns(UserWarning, match="starts again from step 0"):
        made.load_state_dict(made.optim.state_dict())
    assert made.step_count == 0 and made.synchronizer.pending is None


def test_a_plain_optimizers_state_starts_again_from_step_0() -> None:
    run_ranks(_restart, 2)
