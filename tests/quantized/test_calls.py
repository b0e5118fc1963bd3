"""Calls of quantized collectives: tensors of every shape, arguments that do not fit, ranks that call other things."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import on_ranks
from overlap import CollectiveError, ConfigurationError, DQuantType, UnsupportedError, auto_quantize

GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_TENSOR = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAKE: dict[str, Callable[[int], Tensor]] = {
    "empty": lambda value: torch.empty(0),
    "empty, of two dimensions": lambda value: torch.empty(0, 3),
    "of no dimension": lambda value: torch.tensor(float(value)),
    "every second": lambda value: torch.full((4, 12), float(value))[:, ::2],
    "channels_last": lambda value: torch.full((4, 2, 3, 3), float(value)).to(memory_format=torch.channels_last),
}


def _check(name: str, outputs: list[Tensor], values: list[float]) -> None:
    for output, value in zip(outputs, values, strict=True):
        assert torch.equal(output, torch.full_like(output, value)), f"{name}: {output} is not {value}"


def _every_collective(make: Callable[[int], Tensor], kind: DQuantType, rank: int, ranks: int) -> None:
    def quantized(collective: Any) -> Any:
        return auto_quantize(collective, kind)

    each = [float(one + 1) for one in range(ranks)]
    mine, outputs = make(rank + 1), [make(0) for _ in range(ranks)]
    quantized(dist.all_gather)(outputs, mine)
    _check("all_gather", outputs, each)
    for op, value in ((dist.ReduceOp.SUM, sum(each)), (dist.ReduceOp.AVG, 1.5)):
        reduced = make(rank + 1)
        quantized(dist.all_reduce)(reduced, op)
        _check(f"all_reduce {op}", [reduced], [value])
    scattered = make(0)
    quantized(dist.reduce_scatter)(scattered, [make(rank + 1) for _ in range(ranks)])
    _check("reduce_scatter", [scattered], [sum(each)])
    sent = [make(10 * rank + peer) for peer in range(ranks)]
    received = [make(0) for _ in range(ranks)]
    quantized(dist.all_to_all)(received, sent)
    _check("all_to_all", received, [10.0 * peer + rank for peer in range(ranks)])
    gathered = torch.full((ranks * mine.numel(),), 9.0, dtype=mine.dtype)
    quantized(GATHER_INTO)(gathered, mine)
    _check("all_gather_into_tensor", list(gathered.view(ranks, mine.numel())), each)
    whole = torch.full((ranks * mine.numel(),), float(rank + 1), dtype=mine.dtype)
    quantized(SCATTER_TENSOR)(scattered.zero_(), whole)
    _check("reduce_scatter_tensor", [scattered], [sum(each)])
    if mine.dim() and mine.size(0) % ranks == 0:
        single = make(0)
        quantized(dist.all_to_all_single)(single, make(rank + 1))
        _check("all_to_all_single", list(single.chunk(ranks)) if single.numel() else [], each if single.numel() else [])
        nothing, everything = make(7)[:0], make(rank + 1)
        sizes = [mine.size(0), 0] if rank == 0 else [0, 0]
        into = everything if rank == 0 else nothing
        quantized(dist.all_to_all_single)(into, everything if rank == 0 else nothing, sizes, sizes)
        _check("all_to_all_single of some", [into], [float(rank + 1)])


@on_ranks(2)
def test_every_collective_takes_tensors_of_every_shape(rank: int, ranks: int) -> None:
    for name, make in MAKE.items():
        try:
            _every_collective(make, DQuantType.INT8, rank, ranks)
        except Exception as error:
            error.add_note(name)
            raise


# Refused -----------------------------------------------------------------------------------------------------


def test_what_makes_no_quantized_collective_is_refused() -> None:
    for arguments, message in (
        ((dist.barrier, DQuantType.FP16), r"barrier cannot be quantized; these can.*all_to_all_single"),
        ((dist.all_reduce, "fp16"), r"qtype is 'fp16': give one of DQuantType\.FP16, DQuantType\.BFP16"),
        ((dist.all_reduce, DQuantType.FP16, "0.5"), r"quant_loss must be a finite number, got '0.5'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            auto_quantize(*arguments)


def test_pytorchs_own_types_are_taken() -> None:
    from torch.distributed.algorithms._quantization.quantization import DQuantType as Theirs

    for kind in Theirs:
        assert auto_quantize(dist.all_reduce, kind).__name__ == "all_reduce"  # type: ignore[arg-type]


@on_ranks(2)
def test_an_argument_that_does_not_fit_is_named(rank: int, ranks: int) -> None:
    gather, reduce, exchange = (
        auto_quantize(one, DQuantType.INT8) for one in (dist.all_gather, dist.all_reduce, dist.all_to_all_single)
    )
    one, four, odd = torch.ones(1), torch.ones(4), torch.ones(ranks + 1)
    for call, message in (
        (lambda: gather(one, one), "tensor_list is a list of 2 tensors, one for each rank, got Tensor"),
        (lambda: gather([one], one), "tensor_list has 1 tensors"),
        (lambda: gather([four] * ranks, one), "a tensor of tensor_list has 4 elements, and needs 1"),
        (lambda: gather([one] * ranks, one.long()), "torch.int64 cannot be quantized"),
        (lambda: reduce(one, dist.ReduceOp.PRODUCT), "PRODUCT cannot be quantized"),
        (lambda: reduce(one, async_op=True), "done when it returns: leave async_op out"),
        (lambda: exchange(odd, odd), "cannot be split evenly"),
        (lambda: exchange(four, four, [1] * ranks, [2] * ranks), "output_split_sizes are"),
        (lambda: exchange(four, four, in_splits=[1] * ranks), "input_split_sizes are"),
        (lambda: exchange(four, four, in_splits=[2] * ranks, input_split_sizes=[2] * ranks), "under two names"),
    ):
        with pytest.raises((ConfigurationError, UnsupportedError), match=message):
            call()
    # PyTorch's own auto_quantize takes the sizes under these names.
    sent, received = torch.full((3,), float(rank)), torch.full((2 * (rank + 1),), -1.0)
    exchange(received, sent, in_splits=[1, 2], out_splits=[rank + 1] * ranks)
    assert received.tolist() == [0.0] * (rank + 1) + [1.0] * (rank + 1)


@on_ranks(3)
def test_new_calls_that_differ_are_an_error_on_every_rank_after_which_they_go_on(rank: int, ranks: int) -> None:
    reduce, scatter = (auto_quantize(one, DQuantType.FP16) for one in (dist.all_reduce, dist.reduce_scatter))
    reduce(torch.ones(8))
    sizes = (9, 12, 9)
    with pytest.raises(CollectiveError, match=r"SUM all_reduce with a result of (9|12) elements, as Float16"):
        reduce(torch.ones(sizes[rank]))
    with pytest.raises(CollectiveError, match=r"call a quantized SUM reduce_scatter"):
        scatter(torch.empty(7), [torch.ones(7)] * ranks) if rank == 1 else reduce(torch.ones(7))
    tensor = torch.full((6,), float(rank))
    reduce(tensor)
    assert tensor.tolist() == [3.0] * 6
