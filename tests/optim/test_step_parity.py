"""Parity of the update in backward with plain DDP and the same optimizer, exact at every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import CASES, MLP, UNUSED_ON_SOME_RANKS, Case
from overlap import AllReduce, OverlappedOptimizer, Stage, Step, chain

STEPS = 6
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
# With `gradient_as_bucket_view` or without. The corpus of loops has more optimizers, each in one implementation.
OPTIMIZERS: list[tuple[bool, Callable[[Any], torch.optim.Optimizer]]] = [
    (True, functools.partial(SGD, foreach=True)),
    (False, functools.partial(SGD, fused=True)),
    (False, functools.partial(ADAMW, foreach=False, amsgrad=True)),
    (True, functools.partial(ADAMW, fused=True)),
]


class Counting(Stage):
    """The all-reduce, counting its buckets: shows that the candidate really ran and how it was cut."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self._inner = AllReduce()

    async def __call__(self, bucket: Any) -> None:
        self.calls.append((bucket.step, bucket.index))
        await self._inner(bucket)


def _check(rank: int, case: Case, make: Callable[[Any], torch.optim.Optimizer], *, deferred: bool, view: bool) -> None:
    batches = case.batches(rank, steps=STEPS)
    options = {**case.ddp_options(), "gradient_as_bucket_view": view}
    reference_ddp = wrap(case.model(), **options)
    reference = train(reference_ddp, make(reference_ddp.parameters()), batches, step_fn=plain_step)

    ddp = wrap(case.model(), **options)
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    counting = Counting()
    registration = chain(counting, Step(optimizer, deferred=deferred)).register(ddp)
    candidate = train(ddp, optimizer, batches, step_fn=overlapped_step)
    registration.remove()
    assert {step for step, _ in counting.calls} == set(range(STEPS))
    assert max(index for _, index in counting.calls) >= 2, "parity over one bucket shows little"
    assert_parity(candidate, reference, what=f"{optimizer}, {deferred=}, {case}, {view=}")


def _optimizers(rank: int, world_size: int) -> None:
    for view, make in OPTIMIZERS:
        for deferred in (False, True):
            _check(rank, MLP, make, deferred=deferred, view=view)


def test_an_optimizer_equals_plain_ddp() -> None:
    run_ranks(_optimizers, 2)


def _models(rank: int, world_size: int) -> None:
    for case in CASES:
        if case is not MLP:
            _check(rank, case, ADAMW, deferred=False, view=False)
    _check(rank, UNUSED_ON_SOME_RANKS, ADAMW, deferred=True, view=False)


def test_a_kind_of_model_equals_plain_ddp() -> None:
    run_ranks(_models, 2)
