"""What is compressed and where it lies: from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap import PowerSGD
from overlap.hooks.powersgd import layout as layout_module
from overlap.hooks.powersgd.layout import BucketLayout, Factors, layout_of, matrix_shape

from .lockstep import World


def _layout(shapes: Sequence[tuple[int, ...]], rank: int, rate: float, batch_numel: int = 10**9) -> BucketLayout:
    with mock.patch.object(layout_module, "_CPU_BATCH_NUMEL", batch_numel):
        return layout_of(shapes, rank=rank, min_compression_rate=rate, device=torch.device("cpu"))


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=8),
    rank=st.integers(1, 5),
    rate=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    batch_numel=st.sampled_from([0, 20, 1000]),
)
def test_a_layout_has_each_gradient_once_and_factors_of_one_length_side_by_side(
    shapes: list[tuple[int, ...]], rank: int, rate: float, batch_numel: int
) -> None:
    layout = _layout(shapes, rank, rate, batch_numel)
    compressed = [place for batch in layout.batches for place in batch.places]
    assert sorted([*compressed, *layout.exact]) == list(range(len(shapes)))
    for batch in layout.batches:
        assert len(batch.places) == 1 or batch.rows * batch.cols <= batch_numel
        for place in batch.places:
            assert matrix_shape(shapes[place]) == (batch.rows, batch.cols)
        assert batch.rank == min(rank, batch.rows, batch.cols)
    for side in (layout.left, layout.right):
        factors = Factors(side, torch.zeros(side.numel))
        for batch, of_batch in zip(layout.batches, factors.of_batches, strict=True):
            length = batch.rows if side.is_left else batch.cols
            assert of_batch.shape == (len(batch.places), batch.rank, length)
            of_batch.add_(length)
        # Each element belongs to one batch of matrices and to the factors of one rank and length.
        assert len({alike.shape[1:] for alike in factors.alike}) == len(factors.alike)
        assert sum(alike.numel() for alike in factors.alike) == side.numel
        for alike in factors.alike:
            assert bool((alike == alike.shape[2]).all())


def test_matrices_are_compressed_where_it_pays() -> None:
    layout = _layout([(64, 3, 7, 7), (64,), (10, 10), (512, 512)], 4, 2)
    assert layout.exact == (1, 2)
    assert (layout.left.numel, layout.right.numel) == (4 * (64 + 512), 4 * (147 + 512))


def test_nothing_is_compressed_where_the_rank_is_too_large_to_pay() -> None:
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


@pytest.mark.parametrize(("rank", "times_less"), [(1, 243), (2, 136), (4, 72)])
def test_the_papers_volumes_for_resnet18(rank: int, times_less: int) -> None:
    shapes = _resnet18()
    stage = PowerSGD(rank=rank)
    world = World([stage], shapes)
    world.step([[torch.zeros(shape) for shape in shapes]])
    rate, before, after = stage.compression_stats()
    assert before == 11_173_962
    assert sum(world.sent_numel) == after
    assert round(rate) == times_less


def test_alternating_sends_half_in_one_collective() -> None:
    shapes = _resnet18()
    stage = PowerSGD(rank=4, alternate=True)
    world = World([stage], shapes)
    sent = []
    for _ in range(2):
        world.step([[torch.zeros(shape) for shape in shapes]])
        assert len(world.sent_numel) == 1
        sent += world.sent_numel
    assert sum(sent) == stage.compression_stats()[2]
    rate = stage.compression_stats()[0]
    assert rate > 130, rate
