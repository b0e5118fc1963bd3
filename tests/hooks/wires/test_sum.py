"""Gradients through every wire, with and without error feedback, against the same done by hand."""

import torch

from harness import assert_equal_ranks, assert_parity, on_ranks
from harness.wires import summed
from overlap import BFloat16, Float8, Float16, Int4, Int8, Quantize, TopK, Wire

from ..quantize.given import given, of_ranks, reduced

WIRES = [Float16(), BFloat16(), Float8(chunk=128), Int8(), Int4(), TopK(0.01), TopK(0.2, chunk=256)]
SIZES = [1, 7, 300, 9001]


def _every_step(rank: int, world_size: int, wire: Wire, error_feedback: bool) -> None:
    stage = Quantize(wire, error_feedback=error_feedback)
    ddp = given(SIZES, stage)
    held = [[torch.zeros(size) for size in SIZES] for _ in range(world_size)]
    for step in range(3):
        gradients = of_ranks(world_size, SIZES, step)
        got = reduced(ddp, gradients[rank])
        assert_equal_ranks(got)
        for index, result in enumerate(got):
            what = f"{stage!r}, step {step}, {SIZES[index]} values"
            means = [own[index] * (1 / world_size) for own in gradients]
            if error_feedback:
                means = [mean.add_(errors[index]) for mean, errors in zip(means, held, strict=True)]
            expected, errors = summed(wire, means)
            assert_parity(result, expected, what=what)
            for rest, error in zip(held, errors, strict=True):
                rest[index] = error
        if error_feedback:
            remembered = stage.state_dict()["error"]
            for index, rest in enumerate(held[rank]):
                assert_parity(remembered[f"weights.{index}"], rest, what=f"{stage!r}, step {step}, what is left out")
    assert stage.state_dict().keys() >= ({"error"} if error_feedback else set())


@on_ranks(3)
def test_every_wire_with_and_without_error_feedback_is_what_it_is_by_hand(rank: int, world_size: int) -> None:
    for wire in WIRES:
        for error_feedback in (False, True):
            _every_step(rank, world_size, wire, error_feedback)
