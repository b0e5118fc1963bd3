"""DDP as everyone uses it, and the computation alone."""

from __future__ import annotations

from overlap.bench.training_setup import TrainingLoop, TrainingSetup
from overlap.bench.variant import COMPUTE_ONLY, variant


@variant(COMPUTE_ONLY, baseline="ddp-sgd", floor="compute")
def compute_only(setup: TrainingSetup) -> TrainingLoop:
    """Forward and backward without communication or update: what every other row is compared with."""
    ddp = setup.ddp()

    def step() -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            setup.loss(ddp).backward()

    return TrainingLoop(step=step)


@variant("ddp-sgd", optimizer="sgd")
def ddp_sgd(setup: TrainingSetup) -> TrainingLoop:
    return _plain_ddp(setup, "sgd")


@variant("ddp-sgd-fused", optimizer="sgd-fused")
def ddp_sgd_fused(setup: TrainingSetup) -> TrainingLoop:
    return _plain_ddp(setup, "sgd-fused")


@variant("ddp-adamw", optimizer="adamw")
def ddp_adamw(setup: TrainingSetup) -> TrainingLoop:
    return _plain_ddp(setup, "adamw")


@variant("ddp-adamw-fused", optimizer="adamw-fused")
def ddp_adamw_fused(setup: TrainingSetup) -> TrainingLoop:
    return _plain_ddp(setup, "adamw-fused")


def _plain_ddp(setup: TrainingSetup, optimizer: str) -> TrainingLoop:
    ddp = setup.ddp()
    return setup.plain_loop(ddp, setup.optimizer(optimizer, ddp.parameters()))
