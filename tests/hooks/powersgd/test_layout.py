"""Which gradients are compressed: from shapes alone."""

from collections.abc import Sequence

import pytest
import torch

from overlap import PowerSGD
from overlap.hooks.powersgd.algorithm import ReductionLayout, layout_of

from .lockstep import World


def _layout(shapes: Sequence[tuple[int, ...]], rank: int, rate: float) -> ReductionLayout:
    return layout_of(shapes, rank=rank, min_compression_rate=rate, device=torch.device("cpu"))


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
