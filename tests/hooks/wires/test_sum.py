"""Gradients through every wire, with and without error feedback, against the same done by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

import overlap
from harness import assert_parity, run_ranks
from overlap import BFloat16, Float8, Float16, Int4, Int8, Quantize, TopK, Wire

from ..quantize.given import assert_equal_on_all_ranks, given, of_ranks, reduced
from .by_hand import summed

WIRES = [Float16(), BFloat16(), Float8(chunk=128), Int8(), Int4(), TopK(0.01), TopK(0.2, chunk=256)]
SIZES = [1, 7, 300, 9001]
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 4])


def _as_by_hand(rank: int, world_size: int) -> None:
    for wire in WIRES:
        for error_feedback in (False, True):
            _every_step(rank, world_size, wire, error_feedback)


def _every_step(rank: int, world_size: int, wire: Wire, error_feedback: bool) -> None:
    stage = Quantize(wire, error_feedback=error_feedback)
    ddp = given(SIZES, stage)
    held = [[torch.zeros(size) for size in SIZES] for _ in range(world_size)]
    for step in range(3):
        gradients = of_ranks(world_size, SIZES, step)
        got = reduced(ddp, gradients[rank])
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


@WORLD_SIZES
def test_every_wire_with_and_without_error_feedback_is_what_it_is_by_hand(world_size: int) -> None:
    run_ranks(_as_by_hand, world_size)


def _loses_nothing(rank: int, world_size: int) -> None:
    for nearest in WIRES:
        for wire in (nearest, dataclasses.replace(nearest, rounding="stochastic")):
            stage = Quantize(wire, error_feedback=True)
            ddp = given(SIZES, stage)
            came, delivered = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2))
            for step in range(6):
                gradients = of_ranks(world_size, SIZES, step)
                got = reduced(ddp, gradients[rank])
                assert_equal_on_all_ranks(got)
                for index, result in enumerate(got):
                    came[index] += torch.stack([own[index] for own in gradients]).double().mean(0)
                    delivered[index] += result
            for index, error in enumerate(stage.state_dict()["error"].values()):
                held = error.double()
                dist.all_reduce(held)
                assert ((delivered[index] + held) - came[index]).abs().max() <= 5e-6, f"{wire}, {SIZES[index]} values"
                assert SIZES[index] < 300 or held.abs().max() > 1e-5, f"{wire} left nothing out"


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_was_delivered_and_what_is_held_make_up_what_came(world_size: int) -> None:
    run_ranks(_loses_nothing, world_size)


def _shorthand(rank: int, world_size: int) -> None:
    pairs = [
        (Quantize(4, error_feedback=True), Quantize(Int4(), error_feedback=True)),
        (Quantize(), Quantize(Int8())),
        (
            Quantize(bits=4, chunk=64, rounding="stochastic", error_feedback=True),
            Quantize(Int4(chunk=64, rounding="stochastic"), error_feedback=True),
        ),
    ]
    for short, long in pairs:
        assert short.signature == long.signature
        one, other = given(SIZES, short), given(SIZES, long)
        for step in range(2):
            gradients = of_ranks(world_size, SIZES, step)[rank]
            assert_parity(reduced(one, gradients), reduced(other, gradients), what=f"{short!r}, step {step}")
        if any(states := (short.state_dict(), long.state_dict())):
            assert_parity(*states, what=f"the state of {short!r}")


def test_the_shorthand_of_bits_has_the_results_and_the_state_of_its_wire() -> None:
    run_ranks(_shorthand, 2)


def _other_wires(rank: int, world_size: int) -> None:
    wire = Int8() if rank == 0 else Int8(chunk=64)
    with pytest.raises(overlap.OverlapError, match=r"Quantize\(Int8\(\)\).*Quantize\(Int8\(chunk=64\)\)|chunk=64"):
        given(SIZES, Quantize(wire))


def test_ranks_with_another_option_of_the_wire_are_told_at_registration() -> None:
    run_ranks(_other_wires, 2)
