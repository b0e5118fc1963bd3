"""What quantization leaves out comes back in later steps, and nothing else does."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import assert_parity, on_ranks
from overlap import ConfigurationError, Int4, Int8
from overlap.hooks import Quantize
from overlap.hooks.wires.formats import ChunkCodec

from .given import given, of_ranks, reduced

SIZES = [3, 500, 1300]


def _trained(rank: int, world_size: int) -> tuple[Quantize, Any]:
    stage = Quantize(Int4(rounding="stochastic"), error_feedback=True)
    ddp = given(SIZES, stage)
    for step in range(2):
        reduced(ddp, of_ranks(world_size, SIZES, step)[rank])
    return stage, ddp


@on_ranks(2)
def test_a_state_of_another_model_or_rank_is_refused_by_name(rank: int, world_size: int) -> None:
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
        loaded_first = Quantize(Int4(), error_feedback=True)
        loaded_first.load_state_dict(state)
        with pytest.raises(ConfigurationError, match=message):
            given(SIZES, loaded_first)
    assert_parity(stage.state_dict(), saved, what="after states that were refused")


def test_what_does_not_fit_a_stage_is_refused() -> None:
    for call, message in (
        (lambda: Quantize(Int8), r"give Int8\(\)"),
        (lambda: Quantize(8), r"the wire is 8: give one such as Int8\(\)"),
        (lambda: Quantize().load_state_dict({"error": {"weight": torch.ones(2)}}), "make it with error_feedback=True"),
        (lambda: Quantize().load_state_dict({"momentum": 1}), r"has no state \['momentum'\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()


@on_ranks(2)
def test_a_step_that_is_not_finite_on_one_rank_or_fails_changes_no_ranks_memory(rank: int, world_size: int) -> None:
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


@on_ranks(2)
def test_error_feedback_loses_nothing_nor_does_rounding_to_the_gradients_dtype(rank: int, world_size: int) -> None:
    dtype = torch.bfloat16  # ../wires/test_sum.py has float32.
    stage = Quantize(Int4(), error_feedback=True)
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
