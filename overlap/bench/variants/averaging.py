"""Parameters averaged now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlap import Int4, optim
from overlap.bench.training_setup import TrainingLoop, TrainingSetup
from overlap.bench.variant import variant

_PERIOD = 8


@variant("torch-averager", floor="streamed", block_steps=_PERIOD)
def torch_averager(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    return _averaged(setup, PeriodicModelAverager)


@variant("overlap-averager", floor="streamed", block_steps=_PERIOD)
def overlap_averager(setup: TrainingSetup) -> TrainingLoop:
    return _averaged(setup, optim.PeriodicModelAverager)


def _averaged(setup: TrainingSetup, make: Callable[..., Any]) -> TrainingLoop:
    """Both libraries' averager of that name, called behind each step."""
    model = setup.model()
    averager = make(period=_PERIOD, warmup_steps=0, process_group=setup.group)
    local = setup.plain_loop(model)

    def step() -> None:
        local.step()
        averager.average_parameters(model.parameters())

    return TrainingLoop(step=step)


@variant("overlap-local-sgd", floor="streamed", block_steps=_PERIOD)
def overlap_local_sgd(setup: TrainingSetup) -> TrainingLoop:
    return _local_sgd(setup)


@variant("overlap-local-sgd-overlap", floor="streamed", block_steps=_PERIOD)
def overlap_local_sgd_overlap(setup: TrainingSetup) -> TrainingLoop:
    return _local_sgd(setup, overlap=True)


@variant("overlap-local-sgd-int4", floor="streamed", block_steps=_PERIOD)
def overlap_local_sgd_int4(setup: TrainingSetup) -> TrainingLoop:
    return _local_sgd(setup, wire=Int4(), error_feedback=True)


def _local_sgd(setup: TrainingSetup, **options: Any) -> TrainingLoop:
    ddp = setup.ddp()
    optimizer = setup.optimizer(ddp.parameters())
    return setup.plain_loop(ddp, optim.LocalSGD(ddp, optimizer, period=_PERIOD, start_step=0, **options))
