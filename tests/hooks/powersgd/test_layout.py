"""Which gradients are compressed and where their factors are: from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap import PowerSGD
from overlap._torch.device import streams_replaced
from overlap.hooks.powersgd import algorithm
from overlap.hooks.powersgd.algorithm import Factors, ReductionLayout, layout_of

from ..one_stream import OneStream
from .lockstep import World


def _layout(shapes: Sequence[tuple[int, ...]], rank: int, rate: float) -> ReductionLayout:
    return layout_of(shapes, rank=rank, min_compression_rate=rate, device=torch.device("cpu"))


@settings(deadline=None, max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=8),
    rank=st.integers(1, 5),
    rate=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    batch_numel=st.sampled_from([0, 20, 1000]),
    has_streams=st.booleans(),
)
def test_a_layout_has_each_gradient_once_and_factors_of_a_kind_together(
    shapes: list[tuple[int, ...]], rank: int, rate: float, batch_numel: int, has_streams: bool
) -> None:
    streams = streams_replaced(OneStream(has_streams=has_streams))
    with mock.patch.object(algorithm, "_CPU_BATCH_NUMEL", batch_numel), streams:
        layout = _layout(shapes, rank, rate)
    compressed = [place for batch in layout.batches for place in batch.places]
    assert sorted([*compressed, *layout.exact]) == list(range(len(shapes)))
    for batch in layout.batches:
        assert len(batch.places) == 1 or has_streams or batch.rows * batch.cols <= batch_numel
        assert all((shapes[place][0], math.prod(shapes[place][1:])) == batch[1:3] for place in batch.places)
        assert batch.rank == min(rank, batch.rows, batch.cols)
    for side in (layout.left, layout.right):
        factors = Factors(side, torch.zeros(side.owners.numel()))
        first = 0
        for batch, of_batch in zip(layout.batches, factors.of_batches, strict=True):
            assert of_batch.shape == (len(batch.places), batch.rank, batch.rows if side.is_left else batch.cols)
            for number, factor in enumerate(of_batch, first):
                factor.fill_(number)
            first += len(batch.places)
        assert torch.equal(factors.flat.long(), side.owners)
        assert len(side.groups) == len({group[-1][1][1 : 2 if has_streams else 3] for group in side.groups})


def test_matrices_are_compressed_where_it_pays() -> None:
    layout = _layout([(64, 3, 7, 7), (64,), (10, 10), (512, 512)], 4, 2)
    assert layout.exact == (1, 2)
    assert not _layout([(512, 512)], 128, 2).batches


def _resnet18() -> list[tuple[int, ...]]:
    """Shapes of the parameters of the ResNet-18 that is trained on images of 32 x 32."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    planes = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, planes, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if planes != width:
                shapes += [(width, planes, 1, 1), (width,), (width,)]
            planes = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "times_less", "steps"), [(1, 243, 1), (4, 72, 1), (4, 136, 2)])
def test_the_papers_volumes_for_resnet18(rank: int, times_less: int, steps: int) -> None:
    """In two steps that alternate, half of them, in one collective each."""
    shapes = _resnet18()
    stage = PowerSGD(rank=rank, alternate=steps == 2)
    world = World([stage], shapes)
    sent = 0
    for _ in range(steps):
        world.step([[torch.zeros(shape) for shape in shapes]])
        assert len(world.sent_numel) == (1 if steps == 2 else 2)
        sent += sum(world.sent_numel)
    rate, before, after = stage.compression_stats()
    assert before == steps * 11_173_962 and sent == after
    assert round(rate) == times_less
