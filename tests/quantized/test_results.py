"""Quantized collectives beside the plain ones: results and bytes."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.measuring import socket_bytes
from harness import UNKNOWN_BACKEND, assert_parity, on_ranks, run_ranks
from overlap import ConfigurationError, DQuantType, Int4, TopK, auto_quantize

GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
DTYPES = (torch.float32, torch.bfloat16)
# Largest error of one value sent, as a part of the largest value.
ERRORS = {DQuantType.FP16: 2**-11, DQuantType.BFP16: 2**-8, DQuantType.INT8: 0.5 / 127}


def _values(shape: tuple[int, ...], seed: int, dtype: torch.dtype, *, exact: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not exact:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    whole = torch.randint(-127, 128, shape, generator=generator).to(dtype)
    flat = whole.view(-1)
    flat[::8] = 127  # In each chunk, so that integers are whole steps in 8 bits.
    return whole


def _calls(
    rank: int, ranks: int, dtype: torch.dtype, *, exact: bool, plain: bool = False
) -> dict[str, tuple[Any, Any, list[torch.Tensor]]]:
    """By name: a collective, a function that calls it with fresh arguments, and those that it fills."""
    # Ranks of an exact sum hold the same, so that it is on the grid, too.
    mine = functools.partial(_values, dtype=dtype, exact=exact, seed=7 if exact else rank)
    shape = (3, 5, 7)

    def empty(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, 9.0, dtype=dtype)

    into, reduced, single = empty(3 * ranks, 5, 7), mine(shape), empty(4 * ranks, 5)
    # Gloo's own reduce-scatter fills such a tensor in the order of its memory.
    scattered = empty(*shape) if plain else empty(7, 5, 3).transpose(0, 2)
    listed = [empty(*shape) for _ in range(ranks)]
    # Not contiguous, and of sizes of their own for each pair of ranks.
    columns = [empty(7, peer + rank + 1).t() for peer in range(ranks)]
    sends = [mine((peer + rank + 1, 7)) for peer in range(ranks)]
    uneven_in = [(rank + peer) % 3 for peer in range(ranks)]
    uneven = empty(sum(uneven_in), 2, 3)
    parts = [mine(shape) + (0 if exact else peer) for peer in range(ranks)]
    return {
        "all_gather": (dist.all_gather, lambda f: f(listed, mine(shape)), listed),
        "all_gather_into": (GATHER_INTO, lambda f: f(into, mine(shape)), [into]),
        "all_to_all": (dist.all_to_all, lambda f: f(columns, sends), columns),
        "all_to_all_single": (dist.all_to_all_single, lambda f: f(single, mine((4 * ranks, 5))), [single]),
        "uneven": (
            dist.all_to_all_single,
            lambda f: f(uneven, mine((sum(uneven_in), 2, 3)), uneven_in, input_split_sizes=uneven_in),
            [uneven],
        ),
        "all_reduce": (dist.all_reduce, lambda f: f(reduced), [reduced]),
        "reduce_scatter": (dist.reduce_scatter, lambda f: f(scattered, parts), [scattered]),
    }  # fmt: skip


def _compare(rank: int, ranks: int, dtype: torch.dtype, exact: bool) -> None:
    plain = _calls(rank, ranks, dtype, exact=exact, plain=True)
    for name, (collective, call, outputs) in plain.items():
        if name == "all_to_all":  # Not on Gloo: each rank knows what the others send.
            for peer, output in enumerate(outputs):
                shape = (rank + peer + 1, 7)
                output.copy_(_values(shape, 7 if exact else peer, dtype, exact=exact))
        else:
            call(collective)
    for kind, error in ERRORS.items():
        for name, (collective, call, outputs) in _calls(rank, ranks, dtype, exact=exact).items():
            call(auto_quantize(collective, kind))
            for got, want in zip(outputs, plain[name][2], strict=True):
                if exact and ranks == 2:
                    assert_parity(got, want, what=f"{name}, {kind}, {dtype}")
                    continue
                peak = max(float(want.abs().max()) if want.numel() else 0.0, 127.0 if exact else 4.0)
                assert got.dtype == dtype
                bound = (ranks + 1) * (error + (2**-8 if dtype == torch.bfloat16 else 0)) * peak
                assert (got - want).abs().max().item() <= bound if want.numel() else True, (name, kind)


def _compare_all(rank: int, ranks: int) -> None:
    for dtype in DTYPES:
        for exact in (True, False) if ranks == 2 else (False,):
            _compare(rank, ranks, dtype, exact)


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_that_the_type_holds_arrive_in_every_bit_and_others_as_close_as_it_allows(world_size: int) -> None:
    run_ranks(_compare_all, world_size)


@on_ranks(2)
def test_loss_average_and_group(rank: int, ranks: int) -> None:
    tensor = torch.tensor([8.0])
    auto_quantize(dist.all_reduce, DQuantType.BFP16, 4.0)(tensor)
    assert tensor.item() == 2.0 * ranks
    tensor = torch.tensor([8.0])
    auto_quantize(dist.all_reduce, DQuantType.FP16)(tensor, op=dist.ReduceOp.AVG)
    assert tensor.item() == 8.0
    alone = [dist.new_group([one]) for one in range(ranks)]
    tensor = torch.tensor([5.0, 1.0])
    auto_quantize(dist.all_reduce, DQuantType.INT8)(tensor, dist.ReduceOp.SUM, alone[rank])
    assert tensor.tolist() == [5.0, 1.0], "a group of one rounds nothing"
    with pytest.raises(ConfigurationError, match="this rank is not in the group"):
        auto_quantize(dist.all_reduce, DQuantType.INT8)(torch.ones(2), group=alone[1 - rank])


@on_ranks(2)
def test_finite_values_are_saturated_and_others_stay_visible(rank: int, ranks: int) -> None:
    tensor = torch.tensor([1e6, -1e6, 3.0, math.inf, math.nan, 6e4] if rank == 0 else [0.0] * 5 + [6e4])
    auto_quantize(dist.all_reduce, DQuantType.FP16)(tensor)
    assert tensor[:3].tolist() == [65504.0, -65504.0, 3.0]
    assert tensor[3].isinf() and tensor[4].isnan()
    assert tensor[5].isinf(), "a sum that is too large"
    gathered = [torch.zeros(1, dtype=torch.float64) for _ in range(ranks)]
    auto_quantize(dist.all_gather, DQuantType.BFP16)(gathered, torch.tensor([1e300], dtype=torch.float64))
    assert all(one.isfinite() and one > 1e38 for one in gathered), "bfloat16 has the range of float32"


# Bytes -------------------------------------------------------------------------------------------------------


def _bytes(rank: int, ranks: int) -> dict[str, float]:
    shares = {}
    tensor = torch.randn(200_001)
    for kind in DQuantType:
        reduce = auto_quantize(dist.all_reduce, kind)
        reduce(tensor.clone())
        dist.barrier()
        before = socket_bytes()
        for _ in range(2):
            reduce(tensor.clone())
        dist.barrier()
        shares[str(kind)] = (socket_bytes() - before) / (2 * 2 * tensor.nbytes * (ranks - 1) / ranks)
    return shares


def test_an_all_reduce_sends_half_or_a_quarter() -> None:
    for shares in run_ranks(_bytes, 3):
        assert shares["fp16"] == pytest.approx(0.5, rel=0.02)
        assert shares["bfp16"] == pytest.approx(0.5, rel=0.02)
        assert shares["int8"] <= 0.27


@on_ranks(2, backend=UNKNOWN_BACKEND)
def test_without_gloo_it_runs_at_once(rank: int, ranks: int) -> None:
    outputs = [torch.zeros(3) for _ in range(ranks)]
    auto_quantize(dist.all_gather, DQuantType.INT8)(outputs, torch.full((3,), rank + 1.0))
    assert [output.tolist() for output in outputs] == [[one + 1.0] * 3 for one in range(ranks)]


# Wires -------------------------------------------------------------------------------------------------------

STOCHASTIC = Int4(chunk=64, rounding="stochastic")


@on_ranks(2)
def test_any_wire_serves_as_type(rank: int, ranks: int) -> None:
    by_rank = [torch.randn(3, 333, generator=torch.Generator().manual_seed(one)) for one in range(ranks)]
    gather, reduce = auto_quantize(dist.all_gather, STOCHASTIC), auto_quantize(dist.all_reduce, STOCHASTIC)
    outputs = [torch.empty(3, 333) for _ in range(ranks)]
    gather(outputs, by_rank[rank])
    for output, sent in zip(outputs, by_rank, strict=True):
        assert (output - sent).abs().max() <= sent.abs().max() / 7 * 1.001
    reduce(total := by_rank[rank].clone())
    peak = max(float(one.abs().max()) for one in by_rank) * ranks
    assert (total - torch.stack(by_rank).sum(0)).abs().max() <= 2.5 / 7 * peak
    dist.all_gather(outputs, total)
    assert all(torch.equal(output, total) for output in outputs), "ranks differ"
    again = [auto_quantize(dist.all_gather, STOCHASTIC) for _ in range(2)]
    results = [torch.empty(2, ranks, 3, 333) for _ in again]
    for gather, result in zip(again, results, strict=True):
        for call in result:
            gather(list(call), by_rank[rank])
    assert_parity(results[0], results[1], what="the same calls with the same random numbers")
    assert not torch.equal(results[0][0], results[0][1]), "the second call has others"
    sparse = torch.zeros(5000)
    sparse[rank::1000] = rank + 1.0
    auto_quantize(dist.all_reduce, TopK(0.01))(sparse)
    assert [sparse[one].item() for one in range(ranks + 1)] == [*(one + 1.0 for one in range(ranks)), 0.0]
