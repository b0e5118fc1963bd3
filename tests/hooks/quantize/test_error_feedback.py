"""What quantization leaves out comes back in later steps, and nothing else does."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import assert_parity, run_ranks
from overlap import ConfigurationError, RegistrationError, register
from overlap.hooks import Quantize
from overlap.hooks.wires.numbers import ChunkCodec

from .given import Given, given, of_ranks, reduced

SIZES = [3, 500, 1300]


def _trained(rank: int, world_size: int, *, steps: int = 2) -> tuple[Quantize, Any]:
    stage = Quantize(bits=4, error_feedback=True)
    ddp = given(SIZES, stage)
    for step in range(steps):
        reduced(ddp, of_ranks(world_size, SIZES, step)[rank])
    return stage, ddp


def _loses_nothing(rank: int, world_size: int) -> None:
    stage = Quantize(bits=4, error_feedback=True)
    ddp, without = given(SIZES, stage), given(SIZES, Quantize(bits=4))
    true, delivered, lossy = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(3))
    for step in range(12):
        gradients = of_ranks(world_size, SIZES, step)
        for total, summands in zip(true, zip(*gradients, strict=True), strict=True):
            total.add_(torch.stack(summands).double().mean(0))
        for total, result in zip(delivered, reduced(ddp, gradients[rank]), strict=True):
            total.add_(result)
        for total, result in zip(lossy, reduced(without, gradients[rank]), strict=True):
            total.add_(result)
    errors = stage.state_dict()["error"]
    assert sorted(errors) == [f"weights.{index}" for index in range(3)]
    for index in range(3):
        held = errors[f"weights.{index}"].double()
        dist.all_reduce(held)
        # What was delivered and what the ranks still hold make up what came, but for fp32's own rounding.
        assert torch.allclose(delivered[index] + held, true[index], atol=2e-5)
        assert (delivered[index] - true[index]).norm() < 0.6 * (lossy[index] - true[index]).norm()


def test_error_feedback_loses_nothing() -> None:
    run_ranks(_loses_nothing, 2)


def _not_finite(rank: int, world_size: int) -> None:
    stage, ddp = _trained(rank, world_size)
    broken = of_ranks(world_size, SIZES, 0)[rank]
    if rank == 0:
        broken[2][5] = math.inf
    assert not reduced(ddp, broken)[2].isfinite().all()
    assert all(error.isfinite().all() for error in stage.state_dict()["error"].values())
    assert all(result.isfinite().all() for result in reduced(ddp, of_ranks(world_size, SIZES, 1)[rank]))


def test_a_value_that_is_not_finite_never_gets_into_the_memory() -> None:
    run_ranks(_not_finite, 2)


def _loaded(rank: int, world_size: int) -> None:
    stage, ddp = _trained(rank, world_size)
    saved = pickle.loads(pickle.dumps(stage.state_dict()))
    again = Quantize(bits=4, error_feedback=True)
    other = given(SIZES, again)
    again.load_state_dict(saved)
    gradients = of_ranks(world_size, SIZES, 20)[rank]
    assert_parity(reduced(other, gradients), reduced(ddp, gradients), what="after loading")


def test_a_stage_that_loads_anothers_state_goes_on_as_that_one_does() -> None:
    run_ranks(_loaded, 2)


def _two_models(rank: int, world_size: int) -> None:
    stage, _ddp = _trained(rank, world_size, steps=0)
    with pytest.raises(RegistrationError, match="remembers one model's errors already"):
        register(DistributedDataParallel(Given(SIZES)), stage)


def test_one_stage_for_two_models_is_refused() -> None:
    run_ranks(_two_models, 2)


def _fits(rank: int, world_size: int) -> None:
    stage, _ddp = _trained(rank, world_size)
    saved = stage.state_dict()
    error = {"weights.0": torch.ones(3)}
    refused = {
        r"error feedback of weights.0 is of shape \(4,\)": {"error": {"weights.0": torch.ones(4)}},
        r"parameters that the model does not have \(weights.9\).*another model": {
            "error": {"weights.9": torch.ones(4)}
        },
        f"saved by rank {1 - rank} of 2, but this is rank {rank} of 2": {"error": error, "rank": 1 - rank, "ranks": 2},
        f"rank {rank} of 3, but .*Quantize.redistribute": {"error": error, "rank": rank, "ranks": 3},
    }
    for message, state in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            stage.load_state_dict(state)
        loaded_first = Quantize(bits=4, error_feedback=True)
        loaded_first.load_state_dict(state)
        with pytest.raises(ConfigurationError, match=message):
            given(SIZES, loaded_first)
    assert_parity(stage.state_dict(), saved, what="after states that were refused")


def test_a_state_of_another_model_or_rank_is_refused_by_name() -> None:
    run_ranks(_fits, 2)


def _untouched(rank: int, world_size: int) -> None:
    stage, ddp = _trained(rank, world_size)
    before = stage.state_dict()["error"]
    broken = of_ranks(world_size, SIZES, 0)[rank]
    if rank == 0:
        broken[2][5] = math.inf
    reduced(ddp, broken)
    assert_parity(stage.state_dict()["error"], before, what="the memory after a step that is not finite on rank 0")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("the codec broke")

    intact, codec = ChunkCodec.read, ChunkCodec
    codec.read = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the codec broke"):
        reduced(ddp, of_ranks(world_size, SIZES, 1)[rank])
    codec.read = intact  # type: ignore[method-assign]
    assert_parity(stage.state_dict()["error"], before, what="the memory after a pass that failed")
    assert all(result.isfinite().all() for result in reduced(ddp, of_ranks(world_size, SIZES, 1)[rank]))


def test_a_step_that_is_not_finite_on_one_rank_or_fails_changes_no_ranks_memory() -> None:
    run_ranks(_untouched, 2)


def _half(rank: int, world_size: int, dtype: torch.dtype) -> None:
    stage = Quantize(bits=4, error_feedback=True)
    ddp = given(SIZES, stage, dtype)
    true, delivered = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2))
    for step in range(12):
        gradients = [[one.to(dtype) for one in own] for own in of_ranks(world_size, SIZES, step)]
        for total, summands in zip(true, zip(*gradients, strict=True), strict=True):
            total.add_(torch.stack(summands).double().mean(0))
        for total, result in zip(delivered, reduced(ddp, gradients[rank]), strict=True):
            total.add_(result)
    errors = stage.state_dict()["error"]
    for index in range(3):
        held = errors[f"weights.{index}"].double()
        dist.all_reduce(held)
        torch.testing.assert_close(delivered[index] + held, true[index], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_rounding_to_the_gradients_dtype_loses_comes_back_too(dtype: torch.dtype) -> None:
    run_ranks(_half, 2, dtype)


def _states(rank: int, world_size: int) -> Any:
    stage, _ddp = _trained(rank, world_size)
    return stage.state_dict()


def _redistributed(rank: int, world_size: int, states: list[Any]) -> Any:
    stage = Quantize(bits=4, error_feedback=True)
    stage.load_state_dict(Quantize.redistribute(states, rank=rank, ranks=world_size))
    before = stage.state_dict()["error"]
    ddp = given(SIZES, stage)  # Its first pass is of zeros, and delivers what is pending.
    result = [weight.grad.double() for weight in ddp.module.weights]
    errors = stage.state_dict()["error"]
    return before, [(one, errors[f"weights.{index}"].double()) for index, one in enumerate(result)]


def test_another_number_of_ranks_delivers_the_pending_mean_once() -> None:
    states = run_ranks(_states, 4)
    for ranks in (1, 2, 3):
        by_rank = run_ranks(_redistributed, ranks, states)
        for index in range(3):
            pending = sum(state["error"][f"weights.{index}"].double() for state in states)
            delivered = by_rank[0][1][index][0]
            left = sum(rest[index][1] for _, rest in by_rank)
            torch.testing.assert_close(delivered + left, pending, rtol=0, atol=1e-6)
    with pytest.raises(ConfigurationError, match=r"every old rank once, but was given ranks \[0, 1\] of \[4\]"):
        Quantize.redistribute(states[:2], rank=0, ranks=2)


def _without_names(rank: int, world_size: int) -> None:
    by_hook = DistributedDataParallel(Given(SIZES))
    by_hook.register_comm_hook(None, overlap.as_hook(Quantize(error_feedback=True)))
    with pytest.raises(ConfigurationError, match=r"overlap.register\(ddp, hook\)"):
        reduced(by_hook, of_ranks(world_size, SIZES)[rank])


def test_error_feedback_in_a_hook_given_to_ddp_is_an_error_with_the_remedy() -> None:
    run_ranks(_without_names, 2)
