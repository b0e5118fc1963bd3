"""The forms of an update that the model-based test runs, each a way to build it on a DDP model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap import AllReduce, Bucket, OverlappedOptimizer, Registration, Stage, Step, chain


class ArmedError(Exception):
    """What a stage or an optimizer raises on purpose."""


@dataclass
class Arms:
    """What is to raise next; one for this process, so that copies of an optimizer see it, too."""

    stage: str | None = None
    optimizer: bool = False


ARMS = Arms()


@contextlib.contextmanager
def armed(*, stage: str | None = None, optimizer: bool = False) -> Iterator[None]:
    """Have the stage (in the first or the last bucket) or the optimizer's step raise inside the block."""
    ARMS.stage, ARMS.optimizer = stage, optimizer
    try:
        yield
    finally:
        ARMS.stage, ARMS.optimizer = None, False


class ArmedSGD(torch.optim.SGD):
    """Raises when armed, before it changes anything."""

    def step(self, closure: Any = None) -> Any:
        if ARMS.optimizer:
            raise ArmedError("the optimizer")
        return super().step(closure)


class ArmedAdamW(torch.optim.AdamW):
    """As :class:`ArmedSGD`."""

    def step(self, closure: Any = None) -> Any:
        if ARMS.optimizer:
            raise ArmedError("the optimizer")
        return super().step(closure)


class ArmedReduce(Stage):
    """The all-reduce, which raises when armed."""

    async def __call__(self, bucket: Bucket) -> None:
        if (ARMS.stage == "first" and bucket.index == 0) or (ARMS.stage == "last" and bucket.is_last):
            raise ArmedError("the stage")
        await AllReduce()(bucket)


class Net(nn.Module):
    """Three layers, six parameters, three buckets or more; ``is_partial`` leaves the first layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, is_partial: bool = False) -> torch.Tensor:
        hidden = x if is_partial else self.first(x).tanh()
        out: torch.Tensor = self.last(self.middle(hidden).tanh())
        return out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return ArmedSGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return ArmedAdamW(parameters, lr=0.02, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Form:
    """An update: how it is built, and what the oracle has to know of it."""

    name: str
    make: Callable[[Any], torch.optim.Optimizer] = sgd
    is_automatic: bool = False
    """The loop calls no ``step()``."""
    is_deferred: bool = False
    clip: float | None = None
    subset: tuple[int, ...] | None = None
    """The parameters that backward updates, where not all or none."""

    @property
    def in_backward(self) -> frozenset[int]:
        """Which parameters backward updates."""
        if self.is_deferred and not self.is_automatic:
            return frozenset()
        return frozenset(range(6) if self.subset is None else self.subset)

    @property
    def updates_bucket_by_bucket(self) -> bool:
        """Whether a backward that fails on its way may have updated some parameters."""
        return not self.is_deferred

    def optimizer(self, ddp: DistributedDataParallel) -> Any:
        """What the loop holds."""
        made = self.make(ddp.parameters())
        return made if self.is_automatic else OverlappedOptimizer(made)

    def stage(self, ddp: DistributedDataParallel, optimizer: Any) -> Stage:
        """The chain that is registered; may be registered again after it was removed."""
        options: dict[str, Any] = {}
        if self.clip is not None:
            options["clip_grad_norm"] = self.clip
        elif self.is_deferred:
            options["deferred"] = True
        if self.subset is not None:
            parameters = list(ddp.parameters())
            options["params"] = [parameters[place] for place in self.subset]
        return chain(ArmedReduce(), Step(optimizer, **options))

    def register(self, ddp: DistributedDataParallel, stage: Stage) -> Registration:
        return stage.register(ddp)  # type: ignore[attr-defined,no-any-return]

    def __str__(self) -> str:
        return self.name


FORMS = (
    Form(name="step_interleaved"),
    Form(name="step_deferred", is_deferred=True, make=adamw),
    Form(name="step_clipped", is_deferred=True, clip=0.05),
    Form(name="step_automatic", is_automatic=True, make=adamw),
    Form(name="step_deferred_automatic", is_deferred=True, is_automatic=True),
    Form(name="step_clipped_automatic", is_deferred=True, is_automatic=True, clip=0.05),
    Form(name="step_subset", subset=(0, 3, 4)),
)
