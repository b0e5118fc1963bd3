"""The forms of an update that every framework is played with, on ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from overlap import AllReduce, LocalSGD, PowerSGD, Step, ZeroRedundancyOptimizer, ZeroStep, chain


def options_of(form: str, *, is_resumed: bool = False) -> dict[str, Any]:
    """The arguments ``chain`` or ``local_sgd`` of an integration."""
    updates: dict[str, Callable[[Any], Any]] = {
        "interleaved": Step,
        "deferred": partial(Step, deferred=True),
        "zero": ZeroStep,
        "zero deferred": partial(ZeroStep, deferred=True),
        "powersgd": Step,
    }
    if form == "reducer":
        return {"chain": [AllReduce()]}
    if form == "local":
        # Equal to plain until it averages, and interrupted in the middle of a round.
        return {"local_sgd": partial(LocalSGD, period=4, start_step=2 if is_resumed else 1000)}
    if form == "plain":
        return {}
    stages: list[Any] = [] if form.startswith("zero") else [PowerSGD(rank=2) if form == "powersgd" else AllReduce()]
    return {"chain": lambda *optimizers: chain(*stages, *map(updates[form], optimizers))}


def optimizer_of(form: str, parameters: Any, **options: Any) -> Any:
    """AdamW, divided where the form is one of ZeRO."""
    options = {"lr": 1e-2, **options}
    if form.startswith("zero"):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)
    return torch.optim.AdamW(parameters, **options)
