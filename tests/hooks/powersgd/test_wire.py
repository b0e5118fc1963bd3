"""Factors that travel through a wire."""

import math

import pytest
import torch

from overlap import Int4, Int8
from overlap.hooks.wires import Wire

from .by_hand import ByHand
from .checks import gradients, memory, world_of

SHAPES = [(12, 9), (12, 9), (6, 5, 2), (7,)]


@pytest.mark.parametrize("wire", [None, Int8(), Int4(chunk=8)], ids=str)
@pytest.mark.parametrize("alternate", [False, True])
def test_it_computes_what_is_computed_by_hand(alternate: bool, wire: Wire | None) -> None:
    ranks = 3
    world = world_of(ranks, [(12, 9), (5,)], rank=2, alternate=alternate, wire=wire)
    by_hand = ByHand(ranks, (12, 9), 2, alternate=alternate, wire=wire)
    for step in range(8):
        local = gradients(step, ranks, [(12, 9), (5,)], torch.float32)
        wanted = by_hand.step([own[0] for own in local])
        outputs = world.step(local)
        for matrix, vector in outputs:
            torch.testing.assert_close(matrix, wanted, rtol=1e-4, atol=1e-4)
            mean = sum((own[1] * (1 / ranks) for own in local[1:]), local[0][1] * (1 / ranks))
            assert torch.equal(vector, mean), "what is not compressed stays exact"
        for stage, residual in zip(world.stages, by_hand.residuals, strict=True):
            torch.testing.assert_close(memory(stage).get("p0"), residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_sends_the_bytes_that_it_counts(ranks: int) -> None:
    shapes = [(256, 512), (128, 512), (64,)]
    plain, wired = (world_of(ranks, shapes, rank=4, wire=wire) for wire in (None, Int8()))
    for world in (plain, wired):
        world.step(gradients(0, ranks, shapes, torch.float32))
    left, right, exact = (256 + 128) * 4, 2 * 512 * 4, 64
    # Each rank sends every other one its part, and its own sum to all: 2 (W-1)/W of the values, as an all-reduce does.
    messages = [Int8().codec(math.ceil(numel / ranks)).message_bytes for numel in (left, right)]
    exact_bytes = int(2 * 4 * exact * (ranks - 1) / ranks)
    assert wired.sent_bytes == [
        exact_bytes,
        messages[0] * (ranks - 1),
        messages[0] * (ranks - 1),
        messages[1] * (ranks - 1),
        messages[1] * (ranks - 1),
    ]
    assert sum(wired.sent_bytes[1:]) < 0.27 * (sum(plain.sent_bytes) - exact_bytes)
    counted = [stage.compression_stats()[2] for stage in (plain.stages[0], wired.stages[0])]
    assert counted == [left + right + exact, sum(math.ceil(ranks * each / 4) for each in messages) + exact]
