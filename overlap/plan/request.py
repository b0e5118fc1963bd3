"""What `auto` was asked for, checked before anything is measured."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from overlap._checks import as_list, check_group, check_number, check_whole_number, described, is_one_of, told
from overlap._torch.compiled import uncompiled
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim import OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.plan.candidates import ALLOW, CANDIDATES, METHODS, PLAIN, Candidate
from overlap.plan.plan import Plan

__all__ = ["Request", "allowed_candidates", "check_group_exists"]

# What auto itself decides.
_OWN_DDP_OPTIONS = ("module", "process_group", "bucket_cap_mb", "init_sync")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of :func:`overlap.auto`.

    Raises:
        ConfigurationError: one of them is wrong; the message names it.
    """

    model: nn.Module
    optimizer: Optimizer
    sample: Sequence[Any] | None
    loss: Callable[..., Any] | None
    allow: str | Iterable[str]
    updates: str
    memory: str | int | None
    report: str | Path | None
    plan: Plan | None
    seconds: float
    ddp_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._check_model()
        self._check_optimizer()
        allowed_candidates(self.allow, updates=self.updates)
        check_number("seconds", self.seconds, above=0)
        self._check_memory()
        self._check_report()
        if not isinstance(self.ddp_options, Mapping):
            raise ConfigurationError(
                f"ddp_options={told(self.ddp_options)} is not a dict of DistributedDataParallel's arguments"
            )
        for name in _OWN_DDP_OPTIONS:
            if name in self.ddp_options:
                raise ConfigurationError(f"ddp_options has {name!r}, which auto gives to DDP itself: leave it out")
        if self.plan is not None:
            if not isinstance(self.plan, Plan):
                raise ConfigurationError(f"plan is a {described(self.plan)}: give Plan.load(path), or leave it out")
            return
        self._check_sample()

    def _check_model(self) -> None:
        model = uncompiled(self.model)
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            raise ConfigurationError(
                f"model is a {described(model)} already: give the model itself, model.module; auto wraps it in DDP"
            )
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model is a {described(model)}: give the torch.nn.Module that is to be trained")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise ConfigurationError(
                    f"model has {name!r}, which is made in the first forward: run one before the optimizer is made"
                )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigurationError("model has no parameter that requires a gradient: there is nothing to reduce")

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, (OverlappedOptimizer, ZeroRedundancyOptimizer)):
            raise ConfigurationError(
                f"optimizer is a {described(self.optimizer)}: give the plain one; auto wraps it as its choice needs"
            )
        if not isinstance(self.optimizer, Optimizer):
            raise ConfigurationError(
                f"optimizer is a {described(self.optimizer)}: give a torch.optim.Optimizer, such as "
                "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedError(
                f"optimizer is a {described(self.optimizer)}, whose step() needs a closure, and auto measures loops "
                "that call step() alone: use plain DDP with it"
            )
        own = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in own for parameter in self.model.parameters()):
            raise ConfigurationError("optimizer has none of the model's parameters: make it from model.parameters()")

    def _check_sample(self) -> None:
        if not isinstance(self.sample, (tuple, list)) or len(self.sample) < 2:
            got = f"{len(self.sample)} entries" if isinstance(self.sample, (tuple, list)) else described(self.sample)
            raise ConfigurationError(
                f"sample is {got}: give a batch of this rank as a tuple, sample=(x, y), with as many inputs as the "
                "model takes before the target"
            )
        if not callable(self.loss):
            raise ConfigurationError(
                f"loss is a {described(self.loss)}: give a function of output and target, such as "
                "torch.nn.functional.cross_entropy"
            )

    def _check_memory(self) -> None:
        if is_one_of(self.memory, None, "small"):
            return
        if isinstance(self.memory, str):
            raise ConfigurationError(f"memory={self.memory!r} is not 'small', a number of bytes, or None")
        check_whole_number("memory", self.memory, least=1)

    def _check_report(self) -> None:
        if self.report is None:
            return
        if not isinstance(self.report, (str, Path)):
            raise ConfigurationError(f"report is a {described(self.report)}: give the name of a picture, 'plan.png'")
        try:
            folder = Path(self.report).resolve().parent
        except ValueError as error:  # Such as of a name that cannot be encoded.
            raise ConfigurationError(f"report={str(self.report)!r} is no name of a file: {error}") from error
        if not folder.is_dir():
            raise ConfigurationError(
                f"report={str(self.report)!r} lies in a folder that does not exist: create it first"
            )
        if not os.access(folder, os.W_OK) or Path(self.report).is_dir():
            raise ConfigurationError(f"report={str(self.report)!r} cannot be written: give another name")
        if find_spec("matplotlib") is None:
            raise ConfigurationError(
                f"report={str(self.report)!r} needs matplotlib: pip install 'ddp-overlap[timeline]', or leave it out"
            )
        from overlap.plan.picture import formats

        if (known := formats()) and Path(self.report).suffix.removeprefix(".").lower() not in known:
            raise ConfigurationError(
                f"report={str(self.report)!r} has no ending of a picture; known are {', '.join(sorted(known))}"
            )

    def candidates(self) -> list[Candidate]:
        """What may be chosen, plain DDP first."""
        return allowed_candidates(self.allow, updates=self.updates)


def allowed_candidates(allow: str | Iterable[str], *, updates: str = "backward") -> list[Candidate]:
    """The exact ones, plain DDP first, and what else ``allow`` names.

    Raises:
        ConfigurationError: one of its words is unknown, or rules out another.
    """
    if not is_one_of(updates, "backward", "step"):
        raise ConfigurationError(f"updates={told(updates)} is not 'backward' or 'step'")
    names = [allow] if isinstance(allow, str) or (held := as_list(allow)) is None else held
    for name in names:
        if not is_one_of(name, *ALLOW):
            raise ConfigurationError(f"allow has {told(name)}; known are {', '.join(ALLOW)}")
    if updates == "step" and "sharded" in names:
        raise ConfigurationError("allow has 'sharded', which updates in backward, and updates='step': leave one out")
    methods = (METHODS[one.method] for one in CANDIDATES)
    return [
        one
        for one, method in zip(CANDIDATES, methods, strict=True)
        if method.kind in {"exact", *names}
        and ("sharded" in names or not method.is_sharded)
        and (method.name == PLAIN or method.is_deferred == (updates == "step"))
    ]


def check_group_exists(process_group: object) -> dist.ProcessGroup:
    """The group that auto is to choose for.

    Raises:
        ConfigurationError: there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "auto measures the link between ranks, but there is no process group: call "
            "torch.distributed.init_process_group first"
        )
    return check_group("process_group", process_group) or dist.group.WORLD  # type: ignore[return-value]
