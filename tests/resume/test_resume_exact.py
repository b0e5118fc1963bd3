"""A run that is saved in the middle and goes on in new processes ends with the same bits as one that never stopped.

Where DDP keeps the buckets that it begins with, as with ``find_unused_parameters=True``. Otherwise it cuts them anew
after its first pass, and what is rounded by bucket ends as in a run whose ``DistributedDataParallel`` is built anew.
tests/compositions resumes every update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, mean_squared_error
from overlap import (
    Cast,
    Int4,
    Int8,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    Quantize,
    Step,
    TopK,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_stage,
    batched_powerSGD_hook,
    chain,
    powerSGD_hook,
    route,
)
from overlap.hooks import PostLocal, PostLocalSGDState
from overlap.hooks.engine.registration import registration_of

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
STEPS = 6

Build = Callable[[Any, Any], Any]


def _step(ddp: Any, reducer: Any, **options: Any) -> Any:
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(reducer, Step(optimizer, **options)).register(ddp)
    return optimizer


def _automatic(ddp: Any, reducer: Any) -> Any:
    optimizer = SGD(ddp.parameters())
    chain(reducer, Step(optimizer)).register(ddp)
    return optimizer


def _plain(ddp: Any, reducer: Any) -> Any:
    overlap.register(ddp, reducer)
    return SGD(ddp.parameters())


def _zero(ddp: Any, reducer: Any, *, gather: str, **options: Any) -> Any:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, overlap_with_ddp=True, **options
    )
    chain(reducer, ZeroStep(zero, gather=gather)).register(ddp)
    return zero


def _local(ddp: Any, reducer: Any, **options: Any) -> Any:
    return LocalSGD(ddp, SGD(ddp.parameters()), period=2, start_step=2, reducer=reducer, **options)


FORMS: dict[str, Build] = {
    "Step": _step,
    "Step in backward": _automatic,
    "no update stage": _plain,
    "ZeroStep, gathered in forward": functools.partial(_zero, gather="forward"),
    "LocalSGD, overlapped": functools.partial(_local, overlap=1, fragments=2),
    "LocalSGD, outer": functools.partial(_local, outer=OUTER),
}

REDUCERS: dict[str, Callable[[], Any]] = {
    "Quantize, feedback": lambda: Quantize(Int4(), error_feedback=True),
    "Quantize, stochastic": lambda: Quantize(Int4(rounding="stochastic"), error_feedback=True),
    "Quantize, TopK": lambda: Quantize(TopK(0.1, chunk=64), error_feedback=True),
    "Cast, Quantize": lambda: Cast(torch.bfloat16, Quantize(Int4(), error_feedback=True)),
    "PowerSGD": lambda: PowerSGD(rank=1, min_compression_rate=1),
    "PowerSGD, alternating": lambda: PowerSGD(rank=2, min_compression_rate=1, alternate=True),
    "PowerSGD, late and cold": lambda: PowerSGD(rank=2, start_step=2, warm_start=False, min_compression_rate=1),
    "powerSGD_hook": lambda: as_stage(powerSGD_hook, PowerSGDState(None, 2, 1, 1)),
    "batched_powerSGD_hook": lambda: as_stage(batched_powerSGD_hook, PowerSGDState(None, 2, 1, 1)),
    "route": lambda: route({"*.bias": Quantize(Int8()), "*": PowerSGD(rank=1, min_compression_rate=1)}),
    "PostLocal": lambda: PostLocal(PostLocalSGDState(None, None, 5), Quantize(Int4(), error_feedback=True)),
}


def _made(form: str, reducer: str, *, keeps_buckets: bool = True, **model: Any) -> tuple[Any, Any]:
    options = {**BATCH_NORM.ddp_options(), "find_unused_parameters": keeps_buckets}
    ddp = wrap(BATCH_NORM.model(**model), **options)
    return ddp, FORMS[form](ddp, REDUCERS[reducer]())


def _registration(ddp: Any) -> Any:
    registration = registration_of(ddp)
    assert registration is not None
    return registration


def _train(rank: int, ddp: Any, optimizer: Any, steps: range) -> None:
    is_automatic = type(optimizer) is torch.optim.SGD and len(_registration(ddp).stage.sequence) > 1
    for step in steps:
        loss = mean_squared_error(ddp, BATCH_NORM.batch(step, rank))
        if is_automatic:
            loss.backward()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


RUNS = [
    *((form, "Quantize, feedback", 4, True) for form in FORMS),
    *(("ZeroStep, gathered in forward", reducer, 4, True) for reducer in REDUCERS),
    ("Step", "Quantize, feedback", 0, True),
    ("LocalSGD, outer", "PowerSGD", 0, True),
    ("Step", "Quantize, feedback", 4, False),
    ("ZeroStep, gathered in forward", "Cast, Quantize", 4, False),
]
"""Form, reducer, the steps before it is saved, and whether DDP keeps its buckets."""


def _file(folder: Path, rank: int, *run: Any) -> Path:
    return folder / f"{run}-{rank}.pt"


def _saved(rank: int, world_size: int, folder: Path) -> None:
    for form, reducer, at, keeps_buckets in RUNS:
        ddp, optimizer = _made(form, reducer, keeps_buckets=keeps_buckets)
        _train(rank, ddp, optimizer, range(at))
        start = overlap.state_dict(ddp, optimizer)
        if not keeps_buckets:  # The same stages and optimizer in a new DistributedDataParallel.
            stage = _registration(ddp).stage
            _registration(ddp).remove()
            ddp = DistributedDataParallel(ddp.module, **BATCH_NORM.ddp_options())
            overlap.register(ddp, stage)
        _train(rank, ddp, optimizer, range(at, STEPS))
        both = start, overlap.state_dict(ddp, optimizer)
        torch.save(both, _file(folder, rank, form, reducer, at, keeps_buckets))


def _goes_on(rank: int, world_size: int, folder: Path) -> None:
    failures = []
    for run in RUNS:
        form, reducer, at, keeps_buckets = run
        start, end = torch.load(_file(folder, rank, *run), weights_only=True)
        ddp, optimizer = _made(form, reducer, keeps_buckets=keeps_buckets, seed=7)
        overlap.load_state_dict(ddp, optimizer, start)
        _train(rank, ddp, optimizer, range(at, STEPS))
        try:
            assert_parity(overlap.state_dict(ddp, optimizer), end, what=f"{run}")
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


def test_every_stage_resumes_bit_for_bit_in_new_processes(tmp_path: Path) -> None:
    run_ranks(_saved, 2, tmp_path)
    run_ranks(_goes_on, 2, tmp_path)
