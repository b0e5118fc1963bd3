"""Local SGD with a subgroup, and with a hierarchy of groups."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from local_loops import assign, local, mean_of, plain, values_of
from torch import nn

from harness import assert_parity, run_ranks
from harness.models import MLP
from overlap.optim.local_sgd import LocalSGD

REASON = "Gloo adds three and more in another order"


def _pair(rank: int) -> Any:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


def _assert_synchronizes(made: LocalSGD, ddp: Any) -> None:
    made.synchronize()
    assert_parity(
        values_of(ddp.module), mean_of(values_of(ddp.module)), what="synchronized", exact=False, rtol=1e-6, atol=1e-7,
        reason=REASON,
    )  # fmt: skip


def _subgroup(rank: int, world_size: int) -> None:
    pair = _pair(rank)

    def every_four(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % 4 == 0:
            assign(model, mean_of(values_of(model)))

    build = functools.partial(LocalSGD, period=4, start_step=2, subgroup=pair)
    candidate, made, ddp = local(MLP, rank, steps=12, build=build)
    reference = plain(MLP, rank, steps=12, start_step=2, after_step=every_four, gradient_group=pair)
    assert_parity(candidate, reference, what="a subgroup", exact=False, rtol=1e-4, atol=1e-6, reason=REASON)
    _assert_synchronizes(made, ddp)


def test_a_subgroup_goes_on_averaging_gradients() -> None:
    run_ranks(_subgroup, 4)


def _hierarchy(rank: int, world_size: int) -> None:
    pair = _pair(rank)

    def three_levels(model: nn.Module, optimizer: Any, count: int) -> None:
        # Lin et al., hierarchical: all ranks every 4 steps, pairs every 2, none at others.
        if count % 4 == 0:
            assign(model, mean_of(values_of(model)))
        elif count % 2 == 0:
            assign(model, mean_of(values_of(model), pair))

    build = functools.partial(LocalSGD, period={1: 1, 2: 2, 4: 4}, start_step=2)
    candidate, made, ddp = local(MLP, rank, steps=12, build=build)
    reference = plain(MLP, rank, steps=12, start_step=2, after_step=three_levels)
    assert_parity(candidate, reference, what="a hierarchy", exact=False, rtol=1e-4, atol=1e-6, reason=REASON)
    _assert_synchronizes(made, ddp)


def test_a_hierarchy_averages_in_small_groups_often_and_in_large_ones_seldom() -> None:
    run_ranks(_hierarchy, 4)


def _overlapped_hierarchy(rank: int, world_size: int) -> None:
    build = functools.partial(LocalSGD, period={2: 2, 4: 4}, start_step=2, overlap=True)
    _, made, ddp = local(MLP, rank, steps=12, build=build)
    _assert_synchronizes(made, ddp)


def test_an_overlapped_hierarchy_can_be_synchronized() -> None:
    run_ranks(_overlapped_hierarchy, 4)
