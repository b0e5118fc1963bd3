"""Chains that round: each of their steps beside the mean that plain DDP has at the same parameters."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .program import LR, Program
from .sides import Outcome, Side, guarded, words

__all__ = ["check_rounded"]

# Of fp32's arithmetic: of gradients, and of parameters whose differences say what was delivered.
_OF_GRADIENTS, _OF_PARAMETERS = 5e-5, 4 * 2.0**-24


def check_rounded(program: Program) -> Outcome:
    """What became of a program whose update is SGD without momentum, so that a step says what was delivered."""
    largest = torch.zeros((), dtype=torch.float64)
    try:
        plain = Side(program, is_plain=True, largest=largest)
    except Exception as error:
        return Outcome("not plain", f"{type(error).__name__}: {words(error)}", traceback.format_exc())
    outcome, _ = guarded(lambda side: _compare(program, plain, side, largest), program)
    return Outcome("holds") if outcome is None else outcome


def _compare(program: Program, plain: Side, side: Side, largest: Tensor) -> None:
    owed: dict[str, Tensor] = {}
    off = 0.0  # By how much new parameters that were rounded may be off.
    for number in range(program.steps):
        side.settle()
        before = {name: one.detach().clone() for name, one in side.ddp.module.named_parameters()}
        plain.ddp.module.load_state_dict(side.ddp.module.state_dict())
        largest.zero_()
        for parameter in plain.ddp.parameters():
            parameter.grad = None
        plain.backward(number)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        side.step(number)
        side.settle()
        owes = _outstanding(side, before)
        of_all = float(largest)
        for tensors in (owed, owes):
            of_all += max((float(one.abs().max()) for one in tensors.values() if one.numel()), default=0.0)
        was_off = off
        off = program.promise.gather_error * 1.1 * (LR * of_all * (1 + program.promise.error) + was_off)
        gradients = {name: one.grad for name, one in plain.ddp.module.named_parameters()}
        for name, new in side.ddp.module.named_parameters():
            gradient = gradients[name]
            if gradient is None or not new.numel():
                assert torch.equal(new, before[name]), f"step {number}: {name} has no gradient and moved"
                continue
            delivered = (before[name].double() - new.detach().double()) / LR
            error = delivered - gradient.double()
            if program.promise.kind == "nothing lost":
                error += owes.get(name, torch.zeros(())) - owed.get(name, torch.zeros(()))
            bound = _bound(program, gradient, of_all) + (off + was_off) / LR
            bound += _OF_GRADIENTS * of_all + _OF_PARAMETERS * float(before[name].abs().max()) / LR
            found = float(error.abs().max())
            assert found <= bound, (
                f"step {number}: the mean of {name} is off by {found:g}, and {program.promise.kind} allows {bound:g}, "
                f"with gradients of up to {of_all:g}"
            )
        owed = owes
        _check_replicas(side.ddp)


def _bound(program: Program, gradient: Tensor, largest: float) -> float:
    if program.promise.kind == "factors":
        return 1.01 * float(gradient.double().norm())
    return 0.0 if program.promise.kind == "nothing lost" else program.promise.error * largest


def _outstanding(side: Side, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """What all ranks have not delivered yet, as a part of the mean, by parameter."""
    found: dict[str, Tensor] = {}
    if side.program.promise.kind != "nothing lost":
        return found
    for stage in side.stages:
        state = stage.state_dict() if hasattr(stage, "state_dict") else {}
        parts = state.get("error") or {
            name: residual / dist.get_world_size() for name, residual in state.get("residuals", {}).items()
        }
        for name, part in parts.items():
            found[name.removeprefix("module.")] = part.double().clone()
    for name, like in shapes.items():
        part = found.get(name, torch.zeros(like.shape, dtype=torch.float64))
        summed = part.reshape(like.shape).clone()
        dist.all_reduce(summed)
        found[name] = summed
    return found


def _check_replicas(ddp: Any) -> None:
    flat = torch.cat([parameter.detach().double().reshape(-1) for parameter in ddp.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first), "ranks have other parameters"
    assert bool(flat.isfinite().all()), "parameters are not finite"
