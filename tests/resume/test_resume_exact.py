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
from harness.models import BATCH_NORM, Case, mean_squared_error
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
    "Quantize": lambda: Quantize(Int8()),
    "Quantize, feedback": lambda: Quantize(Int4(), error_feedback=True),
    "Quantize, stochastic": lambda: Quantize(Int4(rounding="stochastic"), error_feedback=True),
    "Quantize, TopK": lambda: Quantize(TopK(0.1, chunk=64), error_feedback=True),
    "Cast, Quantize": lambda: Cast(torch.bfloat16, Quantize(Int4(), error_feedback=True)),
    "PowerSGD": lambda: PowerSGD(rank=1, min_compression_rate=1),
    "PowerSGD, alternating": lambda: PowerSGD(rank=2, min_compression_rate=1, alternate=True),
    "PowerSGD, late and cold": lambda: PowerSGD(rank=2, start_step=2, warm_start=False, min_compression_rate=1),
    "Cast, PowerSGD": lambda: Cast(torch.float16, PowerSGD(rank=2, min_compression_rate=1)),
    "powerSGD_hook": lambda: as_stage(powerSGD_hook, PowerSGDState(None, 2, 1, 1)),
    "batched_powerSGD_hook": lambda: as_stage(batched_powerSGD_hook, PowerSGDState(None, 2, 1, 1)),
    "route": lambda: route({"*.bias": Quantize(Int8()), "*": PowerSGD(rank=1, min_compression_rate=1)}),
    "PostLocal": lambda: PostLocal(PostLocalSGDState(None, None, 5), Quantize(Int4(), error_feedback=True)),
}


def _made(case: Case, form: str, reducer: str, *, keeps_buckets: bool = True, **model: Any) -> tuple[Any, Any]:
    ddp = wrap(case.model(**model), **{**case.ddp_options(), "find_unused_parameters": keeps_buckets})
    return ddp, FORMS[form](ddp, REDUCERS[reducer]())


def _train(case: Case, rank: int, ddp: Any, optimizer: Any, steps: range) -> None:
    is_automatic = type(optimizer) is torch.optim.SGD and len(overlap_stages(ddp)) > 1
    for step in steps:
        loss = mean_squared_error(ddp, case.batch(step, rank))
        if is_automatic:
            loss.backward()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def overlap_stages(ddp: Any) -> tuple[Any, ...]:
    registration = registration_of(ddp)
    assert registration is not None
    return registration.stage.sequence


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.pt".replace(" ", "_")


def _uninterrupted(rank: int, world_size: int, case: Case, runs: list[tuple[str, str]], folder: Path, at: int) -> None:
    for form, reducer in runs:
        ddp, optimizer = _made(case, form, reducer)
        _train(case, rank, ddp, optimizer, range(at))
        torch.save(overlap.state_dict(ddp, optimizer), _file(folder, f"{form}-{reducer}", rank))
        _train(case, rank, ddp, optimizer, range(at, STEPS))
        torch.save(overlap.state_dict(ddp, optimizer), _file(folder, f"{form}-{reducer}-end", rank))


def _resumed(
    rank: int,
    world_size: int,
    case: Case,
    runs: list[tuple[str, str]],
    folder: Path,
    at: int,
    keeps_buckets: bool = True,
) -> None:
    failures = []
    for form, reducer in runs:
        ddp, optimizer = _made(case, form, reducer, keeps_buckets=keeps_buckets, seed=7)
        overlap.load_state_dict(ddp, optimizer, torch.load(_file(folder, f"{form}-{reducer}", rank), weights_only=True))
        _train(case, rank, ddp, optimizer, range(at, STEPS))
        end = torch.load(_file(folder, f"{form}-{reducer}-end", rank), weights_only=True)
        try:
            assert_parity(overlap.state_dict(ddp, optimizer), end, what=f"{form}, {reducer}")
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


IN_EVERY_FORM = [(form, "Quantize, feedback") for form in FORMS]
EVERY_REDUCER = [("ZeroStep, gathered in forward", reducer) for reducer in REDUCERS]
BEFORE_THE_FIRST_STEP = [("Step", "Quantize, feedback"), ("LocalSGD, outer", "PowerSGD")]


def _saved(rank: int, world_size: int, folder: Path) -> None:
    _uninterrupted(rank, world_size, BATCH_NORM, IN_EVERY_FORM + EVERY_REDUCER, folder, 4)
    _uninterrupted(rank, world_size, BATCH_NORM, BEFORE_THE_FIRST_STEP, folder / "0", 0)


def _goes_on(rank: int, world_size: int, folder: Path) -> None:
    _resumed(rank, world_size, BATCH_NORM, IN_EVERY_FORM + EVERY_REDUCER, folder, 4)
    _resumed(rank, world_size, BATCH_NORM, BEFORE_THE_FIRST_STEP, folder / "0", 0)


def test_every_stage_resumes_bit_for_bit_in_new_processes(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    run_ranks(_saved, 2, tmp_path)
    run_ranks(_goes_on, 2, tmp_path)


def _wrapped_anew(rank: int, world_size: int, runs: list[tuple[str, str]], folder: Path) -> None:
    """Goes on with the stages and the optimizer that it has, in a new DistributedDataParallel."""
    for form, reducer in runs:
        ddp, optimizer = _made(BATCH_NORM, form, reducer, keeps_buckets=False)
        _train(BATCH_NORM, rank, ddp, optimizer, range(4))
        torch.save(overlap.state_dict(ddp, optimizer), _file(folder, f"{form}-{reducer}", rank))
        registration = registration_of(ddp)
        assert registration is not None
        stage = registration.stage
        registration.remove()
        ddp = DistributedDataParallel(ddp.module, **BATCH_NORM.ddp_options())
        overlap.register(ddp, stage)
        _train(BATCH_NORM, rank, ddp, optimizer, range(4, STEPS))
        torch.save(overlap.state_dict(ddp, optimizer), _file(folder, f"{form}-{reducer}-end", rank))


def test_a_run_whose_buckets_are_cut_anew_resumes_as_one_whose_ddp_is_built_anew(tmp_path: Path) -> None:
    runs = [("Step", "Quantize, feedback"), ("ZeroStep, gathered in forward", "Cast, Quantize")]
    run_ranks(_wrapped_anew, 2, runs, tmp_path)
    run_ranks(_resumed, 2, BATCH_NORM, runs, tmp_path, 4, False)
