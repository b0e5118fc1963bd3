"""Parity of the update in backward with plain DDP and the same optimizer, exact at every step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import CASES, MLP, Case
from overlap import AllReduce, OverlappedOptimizer, Stage, Step, chain

STEPS = 10

# The corpus of loops has more optimizers, each in one implementation.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}
IMPLEMENTATIONS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Counting(Stage):
    """The all-reduce, counting its buckets: shows that the candidate really ran and how it was cut."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self._inner = AllReduce()

    async def __call__(self, bucket: Any) -> None:
        self.calls.append((bucket.step, bucket.index))
        await self._inner(bucket)


def _check(
    rank: int,
    case: Case,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    ddp_options: dict[str, Any] | None = None,
    step_options: dict[str, Any] | None = None,
    plain: Callable[..., Any] = plain_step,
    what: str,
    steps: int = STEPS,
    **train_options: Any,
) -> None:
    batches = case.batches(rank, steps=steps)
    options = {**case.ddp_options(), **(ddp_options or {})}
    reference_ddp = wrap(case.model(), **options)
    reference = train(reference_ddp, make(reference_ddp.parameters()), batches, step_fn=plain, **train_options)

    ddp = wrap(case.model(), **options)
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    counting = Counting()
    registration = chain(counting, Step(optimizer, **(step_options or {}))).register(ddp)
    candidate = train(ddp, optimizer, batches, step_fn=overlapped_step, **train_options)
    registration.remove()
    assert {step for step, _ in counting.calls} == set(range(steps))
    assert max(index for _, index in counting.calls) >= 2, "parity over one bucket shows little"
    assert_parity(candidate, reference, what=what)


def _optimizers(rank: int, world_size: int, deferred: bool) -> None:
    for (name, (cls, arguments)), implementation in itertools.product(OPTIMIZERS.items(), IMPLEMENTATIONS):
        for view in (False, True):
            _check(
                rank,
                MLP,
                functools.partial(cls, **arguments, **IMPLEMENTATIONS[implementation]),
                ddp_options={"gradient_as_bucket_view": view},
                step_options={"deferred": deferred},
                what=f"{name}, {implementation}, {deferred=}, bucket view {view}",
            )


DEFERRED = pytest.mark.parametrize("deferred", [False, True], ids=["interleaved", "deferred"])


@DEFERRED
def test_an_optimizer_equals_plain_ddp(deferred: bool) -> None:
    run_ranks(_optimizers, 2, deferred)


def _models(rank: int, world_size: int, deferred: bool) -> None:
    for case, implementation in itertools.product(CASES, ("foreach", "fused")):
        if implementation == "fused" and case.name == "dtypes":
            continue  # torch's fused kernels do not take several dtypes in one group.
        _check(
            rank,
            case,
            functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, **IMPLEMENTATIONS[implementation]),
            step_options={"deferred": deferred},
            what=f"adamw, {implementation}, {deferred=}, {case}",
            gradients=False,
        )


@DEFERRED
def test_a_kind_of_model_equals_plain_ddp(deferred: bool) -> None:
    run_ranks(_models, 2, deferred)
