"""What few bits cost in learning: a classifier of points in a plane of random features, on 2 ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from local_loops import values_of
from local_wires import gathered
from torch import nn

from harness import assert_parity, run_ranks, wrap
from overlap import Int4, LocalSGD, TopK

OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ROUNDS, PERIOD = 30, 5


def _task() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=generator)
    teacher = torch.randn(16, 4, generator=generator)
    return inputs, (inputs @ teacher + inputs.square() @ teacher.roll(1, 0)).argmax(1)


def _final_loss(rank: int, world_size: int, **options: Any) -> float:
    torch.manual_seed(1)
    inputs, labels = _task()
    ddp = wrap(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4)))
    made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), PERIOD, 0, **options)
    own = torch.arange(len(inputs)) % world_size == rank
    generator = torch.Generator().manual_seed(rank)
    for _ in range(ROUNDS * PERIOD):
        batch = own.nonzero().flatten()[torch.randperm(int(own.sum()), generator=generator)[:32]]
        made.zero_grad()
        nn.functional.cross_entropy(ddp(inputs[batch]), labels[batch]).backward()
        made.step()
    flat = torch.cat([value.flatten() for value in values_of(ddp.module).values()])
    for other in gathered(flat):
        assert_parity(other, flat, what=f"{options}: ranks")
    return nn.functional.cross_entropy(ddp.module(inputs), labels).item()


RUNS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"outer": OUTER},
    "DiLoCo, int4": {"outer": OUTER, "wire": Int4(), "error_feedback": True},
    "averages": {},
    "averages, top 1 %": {"wire": TopK(0.01), "error_feedback": True},
    "averages, top 1 % without feedback": {"wire": TopK(0.01)},
}


def _learning(rank: int, world_size: int) -> None:
    losses = {name: _final_loss(rank, world_size, **options) for name, options in RUNS.items()}
    assert losses["DiLoCo, int4"] < 1.03 * losses["DiLoCo"], losses
    assert losses["averages, top 1 %"] < 1.3 * losses["averages"], losses
    assert losses["averages, top 1 % without feedback"] > 1.1 * losses["averages, top 1 %"], losses


def test_few_bits_with_error_feedback_learn_as_full_precision_does() -> None:
    run_ranks(_learning, 2)
