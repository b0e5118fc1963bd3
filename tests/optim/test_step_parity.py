"""Parity of the update in backward with plain DDP and the same optimizer, for each kind of model; exact at every step.

The corpus of loops has the optimizers, and ``test_declared.py`` their implementations.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import CASES, UNUSED_ON_SOME_RANKS, Case
from overlap import AllReduce, OverlappedOptimizer, Stage, Step, chain

STEPS = 6
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


class Counting(Stage):
    """The all-reduce, counting its buckets: shows that the candidate really ran and how it was cut."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self._inner = AllReduce()

    async def __call__(self, bucket: Any) -> None:
        self.calls.append((bucket.step, bucket.index))
        await self._inner(bucket)


def _check(rank: int, case: Case, make: Any, *, deferred: bool) -> None:
    batches = case.batches(rank, steps=STEPS)
    reference_ddp = wrap(case.model(), **case.ddp_options())
    reference = train(reference_ddp, make(reference_ddp.parameters()), batches, step_fn=plain_step)

    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    counting = Counting()
    registration = chain(counting, Step(optimizer, deferred=deferred)).register(ddp)
    candidate = train(ddp, optimizer, batches, step_fn=overlapped_step)
    registration.remove()
    assert {step for step, _ in counting.calls} == set(range(STEPS))
    assert max(index for _, index in counting.calls) >= 2, "parity over one bucket shows little"
    assert_parity(candidate, reference, what=f"{optimizer}, {deferred=}, {case}")


def _models(rank: int, world_size: int) -> None:
    for place, case in enumerate(CASES):
        _check(rank, case, functools.partial(ADAMW, fused=True) if place % 2 else SGD, deferred=False)
    _check(rank, UNUSED_ON_SOME_RANKS, ADAMW, deferred=True)


def test_a_kind_of_model_equals_plain_ddp() -> None:
    run_ranks(_models, 2)
