"""Quantized gradients among ranks: how far from the mean, how many bytes, and how models train with them."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from benchmarks.measuring import socket_bytes
from harness import assert_parity, overlapped_step, run_ranks, run_threads, train, wrap
from harness.models import CASES, MLP, Case
from overlap import AllReduce, OverlappedOptimizer, Step, chain
from overlap.hooks import GatherQuantized, Quantize

from ..runs import SGD, plain, run
from .given import assert_equal_on_all_ranks, given, of_ranks, reduced

TOPS = {8: 127, 4: 7}
SIZES = [1, 7, 300, 1000, 4099]
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])


def _means(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]


# Results -----------------------------------------------------------------------------------------------------


def _bounded(rank: int, world_size: int, bits: int, rounding: Any, steps: float) -> None:
    gradients = of_ranks(world_size, SIZES)
    means, top = _means(gradients), TOPS[bits]
    ddp = given(SIZES, Quantize(bits=bits, rounding=rounding))
    for step in range(3):
        got = reduced(ddp, gradients[rank])
        assert_equal_on_all_ranks(got)
        for mean, result, *summands in zip(means, got, *gradients, strict=True):
            # A step of each other rank's chunk, divided before the sum, and one of the sum's.
            peaks = sum(float(g.abs().max()) for g in summands) / world_size
            bound = steps * (peaks + peaks + 2 * steps * peaks / top) / top
            assert (result - mean).abs().max() <= bound * 1.0001, (step, len(mean))
        assert any(not torch.equal(result, mean) for mean, result in zip(means, got, strict=True))


@WORLD_SIZES
@pytest.mark.parametrize("bits", TOPS)
@pytest.mark.parametrize(("rounding", "steps"), [("nearest", 0.5), ("stochastic", 1.0)])
def test_means_are_within_a_step_and_equal_on_all_ranks(
    world_size: int, bits: int, rounding: str, steps: float
) -> None:
    run_ranks(_bounded, world_size, bits, rounding, steps)


def _not_finite(rank: int, world_size: int) -> None:
    own = of_ranks(world_size, SIZES)[rank]
    ddp = given(SIZES, Quantize())
    for bad in (math.nan, math.inf):
        broken = [g.clone() for g in own]
        if rank == world_size - 1:
            broken[4][0] = bad
        got = reduced(ddp, broken)
        assert_equal_on_all_ranks(got)
        assert not got[4][:100].isfinite().any() and got[4][-100:].isfinite().all() and got[3].isfinite().all()
    assert all(result.isfinite().all() for result in reduced(ddp, own)), "nothing of it is remembered"


@WORLD_SIZES
def test_a_value_on_one_rank_that_is_not_finite_marks_its_chunk_on_all_ranks_for_one_step(world_size: int) -> None:
    run_ranks(_not_finite, world_size)


def _constants(rank: int, world_size: int) -> None:
    ddp = given(SIZES, Quantize(bits=4))
    for value in (0.0, 0.3):
        for result in reduced(ddp, [torch.full((size,), value) for size in SIZES]):
            assert_parity(result, torch.full_like(result, value), what=f"{value}", **_last_place(world_size))


def _last_place(world_size: int) -> dict[str, Any]:
    if world_size == 2:
        return {}
    return {"exact": False, "rtol": 1e-6, "reason": "thirds of a value add up to it but for the last place"}


@WORLD_SIZES
def test_a_constant_that_is_the_same_on_all_ranks_is_exact(world_size: int) -> None:
    run_ranks(_constants, world_size)


def _other_dtype(rank: int, world_size: int, dtype: torch.dtype) -> None:
    gradients = of_ranks(world_size, SIZES)
    got = reduced(given(SIZES, Quantize(), dtype), [g.to(dtype) for g in gradients[rank]])
    for mean, result in zip(_means(gradients), got, strict=True):
        assert result.dtype == dtype and (result.double() - mean).abs().max() <= 0.06


@WORLD_SIZES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_another_dtype_keep_it(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_other_dtype, world_size, dtype)


def _alone(rank: int, world_size: int) -> None:
    gradients = of_ranks(world_size, [5, 900])
    got = reduced(given([5, 900], Quantize(bits=4)), gradients[rank])
    assert_parity(got, gradients[0], what="one rank rounds nothing")


def test_one_rank_rounds_nothing() -> None:
    run_threads(_alone, 1)


def _stochastic_state(rank: int, world_size: int) -> None:
    stage, again = (Quantize(bits=4, rounding="stochastic") for _ in range(2))
    ddp = given([700], stage)
    gradients = of_ranks(world_size, [700])[rank]
    reduced(ddp, gradients)
    other = given([700], again)
    again.load_state_dict(stage.state_dict())
    assert_parity(reduced(other, gradients), reduced(ddp, gradients), what="the random numbers after loading")


def test_stochastic_rounding_goes_on_with_the_same_random_numbers_after_loading() -> None:
    run_ranks(_stochastic_state, 2)


# Bytes -------------------------------------------------------------------------------------------------------


def _bytes_of_a_step(stage: Any, sizes: Sequence[int]) -> float:
    # The connections of the model before are closed: what they have sent would be missing from the second count.
    gc.collect()
    ddp = given(sizes, stage)
    gradients = [torch.randn(size) for size in sizes]
    for _ in range(2):
        reduced(ddp, gradients)
    dist.barrier()
    before = socket_bytes()
    for _ in range(2):
        reduced(ddp, gradients)
    # Only when all have received is all of it sent.
    dist.barrier()
    return (socket_bytes() - before) / 2


def _bytes(rank: int, world_size: int) -> dict[str, float]:
    sizes = [200_001, 100_003, 50_000]
    all_reduce = _bytes_of_a_step(AllReduce(), sizes)
    assert all_reduce == pytest.approx(2 * 4 * sum(sizes) * (world_size - 1) / world_size, rel=0.02)
    return {
        "8": _bytes_of_a_step(Quantize(bits=8), sizes) / all_reduce,
        "4": _bytes_of_a_step(Quantize(bits=4, error_feedback=True), sizes) / all_reduce,
        "gathered": _bytes_of_a_step(GatherQuantized(512), sizes) / all_reduce,
    }


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def shares(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, float]]]:
    """The world's size, and what each rank sends as a part of what it sends for an all-reduce."""
    return request.param, run_ranks(_bytes, request.param)


@pytest.mark.parametrize(("bits", "share"), [("8", 0.27), ("4", 0.15)])
def test_bytes_sent_are_a_constant_part_of_an_all_reduce(shares: Any, bits: str, share: float) -> None:
    assert all(each[bits] <= share for each in shares[1])


def test_bytes_sent_by_gathering_grow_with_the_ranks(shares: Any) -> None:
    # PyTorch's way: W/2 times a quarter of the all-reduce.
    world_size, by_rank = shares
    assert all(each["gathered"] == pytest.approx(0.127 * world_size, rel=0.05) for each in by_rank)


# Models ------------------------------------------------------------------------------------------------------


def _trains(rank: int, world_size: int, case: Case) -> None:
    reference = run(rank, plain, case, steps=6)
    got = run(rank, chain(Quantize(error_feedback=True)).register, case, steps=6)
    assert_parity(
        [record.parameters for record in got],
        [record.parameters for record in reference],
        what=f"8 bits, {case}",
        exact=False,
        rtol=0.02,
        atol=0.03,
        reason="each gradient is off by a 127th of its chunk's peak, or where parameters are bfloat16 by a 256th",
    )
    assert_equal_on_all_ranks(list(got[-1].parameters.values()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_trains_close_to_plain_ddp(case: Case) -> None:
    run_ranks(_trains, 2, case)


def _updated_in_backward(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(Quantize(bits=4), Step(optimizer)).register(ddp)
    got = train(ddp, optimizer, MLP.batches(rank, steps=6), step_fn=overlapped_step, gradients=True)
    assert_parity(got, run(rank, chain(Quantize(bits=4)).register, steps=6), what="4 bits, updated in backward")


def test_an_update_in_backward_equals_one_after_it() -> None:
    run_ranks(_updated_in_backward, 2)


def _uneven(rank: int, world_size: int) -> None:
    stage = Quantize(error_feedback=True, rounding="stochastic")
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(stage, Step(optimizer)).register(ddp)
    with Join([ddp]):
        for batch in MLP.batches(rank, steps=4 + 3 * rank):
            nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
            optimizer.step()
    assert all(error.isfinite().all() for error in stage.state_dict()["error"].values())
    assert_equal_on_all_ranks([p.detach() for p in ddp.parameters()])


def test_a_rank_that_has_run_out_takes_part() -> None:
    run_ranks(_uneven, 2)
