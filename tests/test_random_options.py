"""Public constructors with random values in the place of their arguments: taken where right, or an error of ours."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import run_ranks
from overlap import OverlapError, hooks, optim
from overlap.plan.choice import check_arguments


class _Touchy:
    """Neither compares nor is true."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise ValueError("compared")

    def __bool__(self) -> bool:
        raise ValueError("asked for its truth")

    def __lt__(self, other: object) -> bool:
        raise ValueError("ordered")

    __le__ = __gt__ = __ge__ = __lt__


class _Shy:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("shown")


VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2, 7, 8, 64, 10**9, 10**30, 10**400, 10**5000, -(10**400), 8 * 10**400, -0.5, -0.0, 0.0, 0.5, 1.5, 1e-320,
    1e308, float("nan"), float("inf"), -float("inf"), 1j, Fraction(1, 3), Fraction(10**400), Decimal("0.5"),
    Decimal("nan"), True, False, None, "", "x", "auto", "nearest", "forward", "0.1", "\ud800", b"x", (), [], [1], [[]],
    {}, {4: 1}, {"*": 2}, {1: "x"}, {"x"}, range(3), object(), type, int, Ellipsis, NotImplemented, len, lambda *_: 1,
    _Touchy(),
    _Shy(), [_Touchy()], {"*": _Touchy()}, torch.float32, torch.int8, torch.ones(()), torch.ones(2), torch.zeros(()),
    torch.empty(0), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64), torch.ones(1, device="meta"),
    np.ones(2), np.ones(0), np.array(8), np.array("auto"), np.array(["auto", "x"]), np.float32(0.5), np.float64(0.5),
    np.int64(8), np.bool_(True), nn.Linear(2, 2), torch.optim.SGD, overlap.AllReduce(), overlap.Int8(), overlap.Int8,
    Path("nowhere/at/all"),
)  # fmt: skip


def _things() -> SimpleNamespace:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    ddp = DistributedDataParallel(model)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return SimpleNamespace(
        model=model,
        ddp=ddp,
        sgd=sgd,
        overlapped=overlap.OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        zero=overlap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True),
        averager=optim.PeriodicModelAverager(4),
    )


_LR = {"lr": 0.1, "weight_decay": 0.0}

# By name: what is called, and its right arguments, to which those of its signature come.
MADE: dict[str, tuple[Callable[..., Any], Callable[[Any], dict[str, Any]]]] = {
    **{
        wire.__name__: (wire, lambda of: {})
        for wire in (overlap.BFloat16, overlap.Float16, overlap.Float8, overlap.Int4, overlap.Int8)
    },
    "TopK": (overlap.TopK, lambda of: {"density": 0.1}),
    "PowerSGD": (overlap.PowerSGD, lambda of: {}),
    "PowerSGDState": (overlap.PowerSGDState, lambda of: {"process_group": None}),
    "Quantize": (overlap.Quantize, lambda of: {}),
    "GatherQuantized": (hooks.GatherQuantized, lambda of: {"chunk": 512}),
    "Cast": (overlap.Cast, lambda of: {"dtype": torch.bfloat16}),
    "PostLocalSGDState": (
        hooks.PostLocalSGDState,
        lambda of: {"process_group": None, "subgroup": None, "start_localSGD_iter": 2},
    ),
    "ClipGradNorm": (overlap.ClipGradNorm, lambda of: {"max_norm": 1.0}),
    "Log": (overlap.Log, lambda of: {"to": lambda step, norms: None}),
    "route": (overlap.route, lambda of: {"rules": {"*": overlap.AllReduce()}}),
    "as_stage": (hooks.as_stage, lambda of: {"hook": overlap.allreduce_hook}),
    "register": (overlap.register, lambda of: {"ddp": of.ddp, "stage": overlap.AllReduce()}),
    "Step": (overlap.Step, lambda of: {"optimizer": of.overlapped}),
    "ZeroStep": (overlap.ZeroStep, lambda of: {"zero": of.zero}),
    "ZeroRedundancyOptimizer": (
        overlap.ZeroRedundancyOptimizer,
        lambda of: {"params": list(of.model.parameters()), "optimizer_class": torch.optim.SGD, **_LR},
    ),
    "FunctionalAdamW": (optim.FunctionalAdamW, lambda of: {"params": list(of.model.parameters()), **_LR}),
    "OverlappedOptimizer": (overlap.OverlappedOptimizer, lambda of: {"optimizer": of.sgd}),
    "OptimizerHookState": (overlap.OptimizerHookState, lambda of: {"optimizer": of.sgd}),
    "LocalSGD": (overlap.LocalSGD, lambda of: {"ddp": of.ddp, "optimizer": of.sgd}),
    "PeriodicModelAverager": (optim.PeriodicModelAverager, lambda of: {"period": 4}),
    "HierarchicalModelAverager": (optim.HierarchicalModelAverager, lambda of: {"period_group_size_dict": {4: 1}}),
    "PostLocalSGDOptimizer": (optim.PostLocalSGDOptimizer, lambda of: {"optim": of.sgd, "averager": of.averager}),
    "average_parameters": (optim.average_parameters, lambda of: {"params": list(of.model.parameters())}),
    "Join": (overlap.Join, lambda of: {"joinables": [of.ddp], "divide_by_initial_world_size": True}),
    "auto_quantize": (
        overlap.auto_quantize,
        lambda of: {"collective": dist.all_reduce, "qtype": overlap.DQuantType.FP16},
    ),
    "auto": (
        check_arguments,
        lambda of: {
            "model": of.model, "optimizer": of.sgd, "sample": (torch.ones(1, 4), torch.ones(1, 4)),
            "loss": nn.MSELoss(),
            "allow": "exact", "updates": "backward", "plan": None, "seconds": 1.0,
            "ddp_options": {},
        },
    ),
    "checkpoint_wrapper": (overlap.checkpoint_wrapper, lambda of: {"module": nn.Linear(2, 2)}),
    "offload_wrapper": (overlap.offload_wrapper, lambda of: {"module": nn.Linear(2, 2)}),
    "TrainState": (overlap.TrainState, lambda of: {"ddp": of.ddp, "optim": of.sgd}),
}  # fmt: skip

_KINDS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}


def _fits(annotation: object, value: Any) -> bool:
    """Whether ``value`` is of the kind that an argument was declared to be; of unknown kinds everything is."""
    kinds = ["str" if kind.startswith("Literal[") else kind for kind in str(annotation).split(" | ")]
    return not all(kind in _KINDS for kind in kinds) or any(_KINDS[kind](value) for kind in kinds)


def _try(rank: int, ranks: int, count: int, seed: int) -> list[str]:
    """Calls each with its right arguments but one or two; returns what ended in an error that is not overlap's, and
    what was taken although it is of another kind than is asked for."""
    rng = random.Random(seed)
    names = sorted(MADE)
    found: set[str] = set()
    with warnings.catch_warnings(action="ignore"):
        of = _things()
        for number in range(count):
            # Each in turn, so that a few hundred reach all.
            name = names[number % len(names)]
            made, right = MADE[name]
            arguments = right(of)
            signature = inspect.signature(made).parameters
            positional = {
                key for key, one in signature.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
            }
            options = sorted(positional | set(arguments))
            changed = {key: rng.choice(VALUES) for key in rng.sample(options, min(len(options), rng.choice((1, 1, 2))))}
            if (fault := _fault_of(name, of, changed)) is not None:
                found.add(f"{name}({', '.join(f'{key}={_text(value)}' for key, value in changed.items())}): {fault}")
    return sorted(found)


def _fault_of(name: str, of: SimpleNamespace, changed: dict[str, Any]) -> str | None:
    """What is wrong with what becomes of these arguments in the place of the right ones; ``None`` where nothing is."""
    made, right = MADE[name]
    signature = inspect.signature(made).parameters
    try:
        result = made(**{**right(of), **changed})
    except OverlapError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    with suppress(AttributeError):
        result.remove()
    wrong = [key for key, value in changed.items() if key in signature and not _fits(signature[key].annotation, value)]
    return f"taken, although {', '.join(f'{key} is {signature[key].annotation}' for key in wrong)}" if wrong else None


def _text(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:
        return f"<{type(value).__name__}>"


def test_random_options_are_taken_or_refused_with_errors_of_ours() -> None:
    assert run_ranks(_try, 1, 500, 0, timeout_s=100) == [[]]
