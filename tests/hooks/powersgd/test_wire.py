"""Factors that travel through a wire."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from overlap import Int4, Int8
from overlap.hooks.wires import Wire

from .checks import gradients, world_of


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize(("wire", "bound"), [(Int8(), 0.04), (Int4(chunk=8), 0.3)], ids=str)
def test_outputs_are_rounded_a_little_and_what_is_not_compressed_is_exact(
    alternate: bool, wire: Wire, bound: float
) -> None:
    shapes = [(12, 9), (5,)]
    options: dict[str, Any] = {"rank": 2, "alternate": alternate, "error_feedback": False}
    plain, wired = (world_of(3, shapes, wire=each, **options) for each in (None, wire))
    local = gradients(0, 3, shapes, torch.float32)
    mean = sum(own[1] * (1 / 3) for own in local)
    for _ in range(8):
        wanted = plain.step(local)[0][0]
        for matrix, vector in wired.step(local):
            assert 0 < float((matrix - wanted).norm() / wanted.norm()) < bound
            assert torch.equal(vector, mean)


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
