"""Plays a random program beside plain DDP on this rank, and says whether what was promised of it holds."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from harness import assert_parity
from overlap import ZeroRedundancyOptimizer
from overlap.hooks.engine.executors import limit_replaced

from .program import Program
from .rounding import check_rounded
from .sides import Outcome, Side, guarded, words

__all__ = ["play"]

# Where something is added up in another order: after a few steps, in fp32 and in bf16. In bf16 the last place of a
# gradient of up to 1 is 0.004, and with momentum a few of them add up.
_SUMMED, _SUMMED_IN_BF16 = {"rtol": 2e-4, "atol": 2e-5}, {"rtol": 3e-2, "atol": 1.2e-2}


def play(program: Program) -> Outcome:
    """What became of a program on this rank."""
    with warnings.catch_warnings(action="ignore"), limit_replaced(2**20 if program.is_inline else 0):
        return check_rounded(program) if program.is_rounded else _check_same(program)


def _check_same(program: Program) -> Outcome:
    try:
        reference = list(_records(Side(program, is_plain=True)))
    except Exception as error:
        return Outcome("not plain", f"{type(error).__name__}: {words(error)}", traceback.format_exc())
    outcome, records = guarded(lambda side: list(_records(side)), program)
    if outcome is not None:
        return outcome
    options: dict[str, Any] = {}
    if program.promise.kind == "summed":
        is_bf16 = "bfloat16" in (program.dtype, *program.blocks)
        options = {"exact": False, "reason": "an order of summation", **(_SUMMED_IN_BF16 if is_bf16 else _SUMMED)}
    try:
        for step, (ours, theirs) in enumerate(zip(records, reference, strict=True)):
            assert_parity(ours, {key: theirs[key] for key in ours}, what=f"step {step}", **options)
    except AssertionError as error:
        return Outcome("differs", words(error))
    return Outcome("holds")


def _records(side: Side) -> Iterator[dict[str, Any]]:
    """What there is after each step, and the optimizers' states at the end."""
    gathers_late = any("forward" in stage for stage in side.program.stages)
    for number in range(side.program.steps):
        loss = side.step(number)
        if gathers_late and number % 2 == 0:
            yield {"loss": loss.clone()}  # Parameters are left on their way.
            continue
        side.settle()
        yield {"loss": loss.clone(), "model": _cloned(side.ddp.module.state_dict())}
    side.settle()
    last = {"model": _cloned(side.ddp.module.state_dict())}
    states = [_state(one) for one in side.optimizers]
    yield {**last, "states": states} if None not in states else last


def _state(optimizer: Any) -> Any:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() != 0:
            return None
    state = optimizer.state_dict()
    return copy.deepcopy({key: state[key] for key in ("state", "param_groups")})


def _cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
