"""The forms of an update that the model-based test runs, each a way to build it on a DDP model."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap import (
    AllReduce,
    Bucket,
    LocalSGD,
    OverlappedOptimizer,
    Registration,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
)
from overlap.hooks.engine import executors
from overlap.hooks.stage import walk
from overlap.optim.update import Update


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


class _Armed(torch.optim.Optimizer):
    """Raises when armed, before it changes anything."""

    def step(self, closure: Any = None) -> Any:
        if ARMS.optimizer:
            raise ArmedError("the optimizer")
        return super().step(closure)


@declare("element")
class ArmedSGD(_Armed, torch.optim.SGD): ...


@declare("element")
class ArmedAdamW(_Armed, torch.optim.AdamW): ...


class ArmedReduce(Stage):
    """The all-reduce, which raises when armed."""

    async def __call__(self, bucket: Bucket) -> None:
        raise_if_armed(bucket)
        await AllReduce()(bucket)


def raise_if_armed(bucket: Bucket) -> None:
    if (ARMS.stage == "first" and bucket.index == 0) or (ARMS.stage == "last" and bucket.is_last):
        raise ArmedError("the stage")


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
    releases: bool = False
    """Whether backward gives gradients back that it has applied."""
    is_inline: bool = False
    """Whether it is played on autograd's thread, as of small models."""
    adds_up: bool = True
    """Whether a second backward before ``step()`` adds up."""
    has_whole_gradients: bool = True
    """Whether all of ``.grad`` is the mean on every rank."""

    @property
    def refuses_step(self) -> bool:
        """Whether a call of ``step()`` is an error."""
        return self.is_automatic

    @property
    def sees_calls(self) -> bool:
        """Whether ``zero_grad`` and ``load_state_dict`` of what the loop holds are calls to the library."""
        return not self.is_automatic

    @property
    def in_backward(self) -> frozenset[int]:
        """Which parameters backward updates."""
        if self.is_deferred and not self.is_automatic:
            return frozenset()
        return frozenset(range(6))

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
        options: dict[str, Any] = {"release_gradients": self.releases, "deferred": self.is_deferred}
        return chain(ArmedReduce(), Step(optimizer, **options))

    def skipping(self, stage: Stage, optimizer: Any) -> AbstractContextManager[None]:
        """Where a backward makes no update."""
        updates = [made for made in walk(stage) if isinstance(made, Update)]
        if not updates:
            return contextlib.nullcontext()
        held: AbstractContextManager[None] = (updates[0] if self.is_automatic else optimizer).skip_update()
        return held

    refuses_local = True
    """Whether ``step()`` refuses gradients that were not reduced."""
    clears = True
    """Whether what was applied is cleared before the next forward."""
    can_be_removed = True

    def register(self, ddp: DistributedDataParallel, stage: Stage, optimizer: Any) -> Registration:
        with mock.patch.object(executors, "SMALL_BYTES", 2**20 if self.is_inline else 0):
            return stage.register(ddp)  # type: ignore[attr-defined,no-any-return]

    def settle(self, optimizer: Any) -> None:
        """Called before parameters are compared."""

    def state(self, optimizer: Any) -> Any:
        """The whole state, as the plain optimizer's; called on every rank."""
        return optimizer.state_dict()

    compares_state_always = True
    """Whether the state can be had at any time, at little cost."""

    def __str__(self) -> str:
        return self.name


class ArmedZeroStep(ZeroStep):
    """Raises when armed."""

    async def __call__(self, bucket: Bucket) -> None:
        raise_if_armed(bucket)
        await super().__call__(bucket)


@dataclass(frozen=True, kw_only=True)
class ZeroForm(Form):
    """The sharded update: a rank owns a part of each parameter, of its gradient's mean and of the state."""

    adds_up: bool = False
    has_whole_gradients: bool = False
    gather: str = "backward"
    compares_state_always = False

    @property
    def refuses_step(self) -> bool:
        return False

    @property
    def sees_calls(self) -> bool:
        return True

    def optimizer(self, ddp: DistributedDataParallel) -> Any:
        return ZeroRedundancyOptimizer.from_optimizer(self.make(ddp.parameters()))

    def stage(self, ddp: DistributedDataParallel, optimizer: Any) -> Stage:
        options = {"automatic": self.is_automatic, "gather": self.gather, "release_gradients": self.releases}
        return chain(ArmedZeroStep(optimizer, deferred=self.is_deferred, **options))

    def settle(self, optimizer: Any) -> None:
        optimizer.wait()

    def state(self, optimizer: Any) -> Any:
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                state = copy.deepcopy(optimizer.state_dict())
        return state


@dataclass(frozen=True, kw_only=True)
class LocalForm(Form):
    """LocalSGD before ranks train alone. Its ``step()`` updates: gradients are the loop's to clear, and are applied
    whatever they are."""

    is_deferred: bool = True
    can_be_removed = False
    refuses_local = False
    clears = False

    def optimizer(self, ddp: DistributedDataParallel) -> Any:
        return LocalSGD(ddp, self.make(ddp.parameters()), reducer=ArmedReduce(), period=1, start_step=1000)

    def stage(self, ddp: DistributedDataParallel, optimizer: Any) -> Stage:
        stage: Stage = optimizer.registration.stage
        return stage

    def register(self, ddp: DistributedDataParallel, stage: Stage, optimizer: Any) -> Registration:
        registration: Registration = optimizer.registration
        return registration


FORMS: tuple[Form, ...] = (
    Form(name="step_interleaved"),
    Form(name="step_deferred", is_deferred=True, make=adamw),
    Form(name="step_automatic", is_automatic=True, make=adamw),
    Form(name="step_deferred_automatic", is_deferred=True, is_automatic=True),
    Form(name="step_released", releases=True),
    Form(name="step_inline", is_inline=True),
    Form(name="step_automatic_inline", is_inline=True, is_automatic=True, make=adamw),
    ZeroForm(name="zero_interleaved"),
    ZeroForm(name="zero_deferred", is_deferred=True, make=adamw),
    ZeroForm(name="zero_automatic", is_automatic=True),
    ZeroForm(name="zero_gather_in_forward", gather="forward", make=adamw),
    ZeroForm(name="zero_deferred_gather_in_forward", is_deferred=True, gather="forward"),
    ZeroForm(name="zero_released", releases=True),
    ZeroForm(name="zero_inline", is_inline=True, gather="forward", make=adamw),
    LocalForm(name="local_before_start", make=adamw),
)
