"""With gather="forward" a bucket is gathered in parts, which the next forward needs one after the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap import Int8, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero import shards
from overlap.optim.zero.shards import parts_by_need

WIDTH = 16
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
LAYERS = 4
# A part for each layer, though all are in one bucket.
shards._LEAST_BYTES = LAYER_BYTES


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_parts_are_the_bucket_from_its_end_each_as_small_as_it_may_be(sizes: list[int], least: int) -> None:
    parts = parts_by_need(sizes, least)
    places = [list(range(len(sizes))[part]) for part in parts]
    assert list(itertools.chain.from_iterable(reversed(places))) == list(range(len(sizes)))
    held = [[sizes[place] for place in part] for part in places]
    assert len(held) == 1 or all(sum(part) >= least for part in held)
    # All but the last, to which what is left over is added, would have too little without their first parameter.
    assert all(sum(part[1:]) < least for part in held[:-1])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class _Launches:
    """An observer that notes what is launched."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int, int]] = []

    def launched(self, subject: Any, label: str, operation: Any) -> None:
        self.noted.append((operation.label, subject.index, operation.sent_bytes))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _loss(ddp: nn.Module, step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    loss: torch.Tensor = ddp(torch.randn(4, WIDTH)).square().mean()
    return loss


def _zero(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True, **options)


def _launched(rank: int, world_size: int, options: dict[str, Any], stage: dict[str, Any]) -> list[Any]:
    ddp = DistributedDataParallel(_model())
    zero = _zero(ddp, **options)
    registration = chain(ZeroStep(zero, gather="forward", **stage)).register(ddp)
    launches = _Launches()
    for step in range(3):
        zero.wait()
        if step == 2:
            registration.observer = launches  # type: ignore[assignment]
        _loss(ddp, step, rank).backward()
        zero.step()
    zero.wait()
    return launches.noted


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gathers_the_parts_of_a_bucket_after_its_reduction(world_size: int) -> None:
    noted = run_ranks(_launched, world_size, {}, {})
    first, *others = ([(label, index) for label, index, _ in rank] for rank in noted)
    assert first == [("reduce_scatter", 0)] + [("all_gather", 0)] * LAYERS
    assert all(other == first for other in others)
    # All ranks together send what one message for the whole bucket would be.
    gathered = sum(sent for rank in noted for _, _, sent in rank[1:])
    assert gathered == LAYERS * LAYER_BYTES * (world_size - 1)


@pytest.mark.parametrize(
    ("options", "stage"),
    [({"partition": "parameter"}, {}), ({}, {"gather_wire": Int8()})],
    ids=["by parameter", "through a wire"],
)
def test_whole_parameters_and_wires_are_gathered_by_bucket(options: dict[str, Any], stage: dict[str, Any]) -> None:
    for noted in run_ranks(_launched, 2, options, stage):
        assert len(noted) == 2
