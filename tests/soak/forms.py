"""The forms of training: each builds the same small model with an optimizer and its stages."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from compositions.sentences import ADAMW, SGD, sharded, with_update
from harness.models import MLP
from overlap import AllReduce, Bucket, Int4, LocalSGD, PowerSGD, Quantize, Stage, chain
from overlap.hooks import Role

START_STEP = 4


class Planned(Exception):
    """The error that a fault raises on its victim."""


class Trap(Stage):
    """Changes nothing, and raises in one step if it is set. Every rank has one, so that all plans are alike."""

    role = Role.TRANSFORM

    def __init__(self) -> None:
        self.set_for: int | None = None
        self.step = -1

    async def __call__(self, bucket: Bucket) -> None:
        if self.step == self.set_for:
            raise Planned(f"the stage raises in step {self.step}, bucket {bucket.index}")


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a loop needs."""

    ddp: DistributedDataParallel
    optimizer: Any
    trap: Trap


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to train. `build(ddp, trap, is_other)` registers the stages and returns the loop's optimizer."""

    name: str
    build: Callable[[DistributedDataParallel, Trap, bool], Any]
    is_joined: bool = False
    has_stages: bool = True
    is_ours: bool = True
    rounds_by_bucket: bool = False

    def made(self, *, is_other: bool = False) -> Built:
        ddp = DistributedDataParallel(MLP.model(), **MLP.ddp_options())
        trap = Trap()
        return Built(ddp=ddp, optimizer=self.build(ddp, trap, is_other), trap=trap)


def _stages(trap: Trap, is_other: bool) -> list[Callable[[], Stage]]:
    return [lambda: trap, Trap] if is_other else [lambda: trap]  # One more is another plan.


def _plain(ddp: Any, trap: Trap, is_other: bool) -> Any:
    return ADAMW(ddp.parameters())


def _step(ddp: Any, trap: Trap, is_other: bool, *, reducer: Callable[[], Stage] = AllReduce) -> Any:
    return with_update(*_stages(trap, is_other), reducer)(ddp)[0]


def _zero(ddp: Any, trap: Trap, is_other: bool, **options: Any) -> Any:
    return sharded(*_stages(trap, is_other), **options)(ddp)[0]


def _local(ddp: Any, trap: Trap, is_other: bool, **options: Any) -> Any:
    reducer = chain(*(make() for make in _stages(trap, is_other)), AllReduce())
    return LocalSGD(ddp, SGD(ddp.parameters()), period=2, start_step=START_STEP, reducer=reducer, **options)


def _powersgd() -> Stage:
    return PowerSGD(rank=1, min_compression_rate=1)


def _quantize() -> Stage:
    return Quantize(Int4(), error_feedback=True)


_ALL = (
    Form(name="plain DDP", build=_plain, has_stages=False, is_ours=False),
    Form(name="chain, Step", build=_step),
    Form(name="ZeroStep, gathered in backward", build=_zero),
    Form(name="ZeroStep, gathered in forward", build=functools.partial(_zero, gather="forward")),
    Form(name="ZeroStep, gathered in step", build=functools.partial(_zero, deferred=True)),
    Form(name="PowerSGD", build=functools.partial(_step, reducer=_powersgd), rounds_by_bucket=True),
    Form(name="Quantize", build=functools.partial(_step, reducer=_quantize), rounds_by_bucket=True),
    Form(name="LocalSGD", build=_local),
    Form(name="LocalSGD, overlapped", build=functools.partial(_local, overlap=True)),
    Form(name="Join", build=_step, is_joined=True),
    Form(name="Join, plain DDP", build=_plain, is_joined=True, has_stages=False),
)
FORMS = {form.name: form for form in _ALL}
