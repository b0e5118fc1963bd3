"""Parameter groups: each with its hyperparameters, and one more on the way."""

from __future__ import annotations

from typing import Any

import torch
from step_loops import overlapped_ddp, plain_ddp

from harness import Record, assert_parity, overlapped_step, plain_step, run_ranks, train
from harness.models import MLP


def _two_groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW(
        [{"params": parameters[:3], "lr": 0.03, "weight_decay": 0.0}, {"params": parameters[3:]}], lr=0.01
    )


def _trained_with_two_groups(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)
    ddp, optimizer = plain_ddp(MLP, _two_groups)
    reference = train(ddp, optimizer, batches)
    ddp, overlapped, _ = overlapped_ddp(MLP, _two_groups)
    assert_parity(train(ddp, overlapped, batches, step_fn=overlapped_step), reference, what="two groups")


def test_each_group_is_updated_with_its_own_hyperparameters() -> None:
    run_ranks(_trained_with_two_groups, 2)


def _first_four(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:4], lr=0.1, momentum=0.9)


def _with_a_group_added(rank: int, ddp: Any, optimizer: Any, step_fn: Any) -> list[Record]:
    batches = MLP.batches(rank, steps=6)
    ddp.zero_grad()
    before = train(ddp, optimizer, batches[:3], step_fn=step_fn, min_buckets=1)
    ddp.zero_grad()  # What the optimizer has no group for yet keeps its gradient, as with any optimizer.
    optimizer.add_param_group({"params": list(ddp.parameters())[4:], "lr": 0.01})
    return before + train(ddp, optimizer, batches[3:], step_fn=step_fn)


def _added_groups(rank: int, world_size: int) -> None:
    reference = _with_a_group_added(rank, *plain_ddp(MLP, _first_four), plain_step)
    ddp, overlapped, _ = overlapped_ddp(MLP, _first_four)
    candidate = _with_a_group_added(rank, ddp, overlapped, overlapped_step)
    assert_parity(candidate, reference, what="a group added on the way")


def test_a_group_that_is_added_between_steps_is_updated_from_then_on() -> None:
    run_ranks(_added_groups, 2)
