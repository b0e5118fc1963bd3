"""Quantized collectives beside the plain ones: results, bytes, overflow, and works that are waited for."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import assert_parity, run_ranks, run_threads
from overlap import ConfigurationError, DQuantType, QuantizationOverflowError, UnsupportedError, auto_quantize
from overlap.bench.wire import socket_bytes

GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_TENSOR = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
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
    largest = mine(shape)
    return {
        "all_gather": (dist.all_gather, lambda f, **k: f(listed, mine(shape), **k), listed),
        "all_gather_into": (GATHER_INTO, lambda f, **k: f(into, mine(shape), **k), [into]),
        "all_to_all": (dist.all_to_all, lambda f, **k: f(columns, sends, **k), columns),
        "all_to_all_single": (dist.all_to_all_single, lambda f, **k: f(single, mine((4 * ranks, 5)), **k), [single]),
        "uneven": (
            dist.all_to_all_single,
            lambda f, **k: f(uneven, mine((sum(uneven_in), 2, 3)), uneven_in, input_split_sizes=uneven_in, **k),
            [uneven],
        ),
        "all_reduce": (dist.all_reduce, lambda f, **k: f(reduced, **k), [reduced]),
        "all_reduce max": (dist.all_reduce, lambda f, **k: f(largest, dist.ReduceOp.MAX, **k), [largest]),
        "reduce_scatter": (dist.reduce_scatter, lambda f, **k: f(scattered, parts, **k), [scattered]),
    }  # fmt: skip


def _all(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for exact in (True, False):
            plain = _calls(rank, ranks, dtype, exact=exact, plain=True)
            for name, (collective, call, outputs) in plain.items():
                if name == "all_to_all":  # Not on Gloo: each rank knows what the others send.
                    for peer, output in enumerate(outputs):
                        shape = (rank + peer + 1, 7)
                        output.copy_(_values(shape, 7 if exact else peer, dtype, exact=exact))
                else:
                    call(collective)
            for kind, error in ERRORS.items():
                for async_op in (False, True):
                    ours = _calls(rank, ranks, dtype, exact=exact)
                    works = []
                    for collective, call, _ in ours.values():
                        work = call(auto_quantize(collective, kind, overflow="raise"), async_op=async_op)
                        assert (work is None) != async_op
                        works.append(work)
                    if async_op:  # All are under way at once, and may be waited for in any order.
                        for work, (_, _, outputs) in reversed(list(zip(works, ours.values(), strict=True))):
                            assert work.get_future().wait()[0] is outputs[0]
                            assert work.wait() and work.is_completed() and work.is_success()
                    for name, (_, _, outputs) in ours.items():
                        for got, want in zip(outputs, plain[name][2], strict=True):
                            if exact and ranks == 2:
                                assert_parity(got, want, what=f"{name}, {kind}, {dtype}")
                                continue
                            peak = max(float(want.abs().max()) if want.numel() else 0.0, 127.0 if exact else 4.0)
                            assert got.dtype == dtype
                            bound = (ranks + 1) * (error + (2**-8 if dtype == torch.bfloat16 else 0)) * peak
                            assert (got - want).abs().max().item() <= bound if want.numel() else True, (name, kind)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_the_plain_collective(world_size: int) -> None:
    run_ranks(_all, world_size)


def _edges(rank: int, ranks: int) -> None:
    fp16 = auto_quantize(dist.all_reduce, DQuantType.FP16)
    # What is too large is saturated, and said so where it is waited for; what is infinite stays so.
    tensor = torch.tensor([1e6, -1e6, 3.0, math.inf, math.nan] if rank == 0 else [0.0] * 5)
    if rank == 0:
        with pytest.warns(RuntimeWarning, match="all_reduce: values too large"):
            fp16(tensor)
    else:
        fp16(tensor)
    assert tensor[:3].tolist() == [65504.0, -65504.0, 3.0]
    assert tensor[3].isinf() and tensor[4].isnan()
    gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    outputs = [torch.zeros(2) for _ in range(ranks)]
    work = gather(outputs, torch.tensor([float(rank), 1e5 * (rank == 0)]), async_op=True)
    if rank == 0:
        with pytest.warns(RuntimeWarning, match="all_gather: values too large"):
            work.wait()
    else:
        work.wait()
    assert [output.tolist() for output in outputs[:2]] == [[0.0, 65504.0], [1.0, 0.0]]
    # Or it is an error, on every rank, that names the rank's part in it; and all goes on.
    for collective, arguments in (
        (dist.all_gather, ([torch.zeros(1) for _ in range(ranks)], torch.tensor([1e5 * (rank == 1)]))),
        (dist.all_reduce, (torch.tensor([1e5 * (rank == 1)]),)),
        (dist.all_reduce, (torch.tensor([6e4]),)),  # The sum is too large, no rank's part is.
    ):
        strict = auto_quantize(collective, DQuantType.FP16, overflow="raise")
        with pytest.raises(QuantizationOverflowError, match=r"larger than 65504.*overflow='saturate'"):
            strict(*arguments)
        work = strict(*arguments, async_op=True)
        with pytest.raises(QuantizationOverflowError):
            work.wait()
        assert not work.is_success()
    # One bad value in 8 bits marks its chunk and no other; double is saturated at the end of fp32's range.
    int8 = auto_quantize(dist.all_reduce, DQuantType.INT8)
    long = torch.ones(4096, dtype=torch.float64)
    long[0] = math.nan if rank == 0 else 1.0
    int8(long)
    assert not long[0].isfinite() and torch.equal(long[2048:], torch.full((2048,), float(ranks), dtype=torch.float64))
    with pytest.warns(RuntimeWarning):
        auto_quantize(dist.all_reduce, DQuantType.BFP16)(torch.tensor([1e300], dtype=torch.float64))
    # Divided by the loss; averages; nothing at all; a group of its own.
    tensor = torch.tensor([8.0])
    auto_quantize(dist.all_reduce, DQuantType.BFP16, 4.0)(tensor)
    assert tensor.item() == 2.0 * ranks
    tensor = torch.tensor([8.0])
    auto_quantize(dist.all_reduce, DQuantType.FP16)(tensor, op=dist.ReduceOp.AVG)
    assert tensor.item() == 8.0
    int8(torch.empty(0))
    alone = [dist.new_group([one]) for one in range(ranks)]
    tensor = torch.tensor([5.0, 1.0])
    int8(tensor, dist.ReduceOp.SUM, alone[rank])
    assert torch.allclose(tensor, torch.tensor([5.0, 1.0]), atol=0.02)
    with pytest.raises(ConfigurationError, match="this rank is not in the group"):
        int8(tensor, group=alone[1 - rank])
    scatter = torch.empty(3)
    auto_quantize(SCATTER_TENSOR, DQuantType.INT8)(scatter, torch.full((ranks, 3), 2.0))
    assert scatter.tolist() == [2.0 * ranks] * 3
    _refusals(ranks)


def _refusals(ranks: int) -> None:
    gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    for message, call in {
        "tensor_list has 1 tensors": lambda: gather([torch.ones(1)], torch.ones(1)),
        "a tensor of tensor_list has 2 elements, and needs 1": lambda: gather([torch.ones(2)] * ranks, torch.ones(1)),
        "torch.int64 cannot be quantized": lambda: gather([torch.ones(1)] * ranks, torch.ones(1, dtype=torch.long)),
        "PRODUCT cannot be quantized": lambda: auto_quantize(dist.all_reduce, DQuantType.INT8)(
            torch.ones(1), dist.ReduceOp.PRODUCT
        ),
        "cannot be split evenly": lambda: auto_quantize(dist.all_to_all_single, DQuantType.INT8)(
            torch.ones(ranks + 1), torch.ones(ranks + 1)
        ),
        "output_split_sizes are": lambda: auto_quantize(dist.all_to_all_single, DQuantType.INT8)(
            torch.ones(4), torch.ones(4), [1] * ranks, [2] * ranks
        ),
        "output_tensor is not contiguous": lambda: auto_quantize(GATHER_INTO, DQuantType.INT8)(
            torch.ones(3, ranks).t(), torch.ones(3)
        ),
    }.items():
        with pytest.raises((ConfigurationError, UnsupportedError), match=message):
            call()


def test_overflow_and_other_edges() -> None:
    run_ranks(_edges, 2)


def test_what_cannot_be_quantized_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"barrier cannot be quantized; these can.*all_to_all_single"):
        auto_quantize(dist.barrier, DQuantType.FP16)
    with pytest.raises(ConfigurationError, match=r"qtype is 'fp16': give one of <DQuantType.FP16"):
        auto_quantize(dist.all_reduce, "fp16")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="quant_loss is 0"):
        auto_quantize(dist.all_reduce, DQuantType.FP16, 0.0)
    with pytest.raises(ConfigurationError, match="overflow is 'wrap'"):
        auto_quantize(dist.all_reduce, DQuantType.FP16, overflow="wrap")  # type: ignore[arg-type]


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


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_all_reduce_sends_half_or_a_quarter_at_any_number_of_ranks(world_size: int) -> None:
    for shares in run_ranks(_bytes, world_size):
        assert shares["fp16"] == pytest.approx(0.5, rel=0.02)
        assert shares["bfp16"] == pytest.approx(0.5, rel=0.02)
        assert shares["int8"] <= 0.27


def _inline(rank: int, ranks: int) -> None:
    outputs = [torch.zeros(3) for _ in range(ranks)]
    work = auto_quantize(dist.all_gather, DQuantType.INT8)(outputs, torch.full((3,), rank + 1.0), async_op=True)
    assert work.is_completed()
    assert [output.tolist() for output in outputs] == [[one + 1.0] * 3 for one in range(ranks)]


def test_without_gloo_it_runs_at_once() -> None:
    run_threads(_inline, 2)
