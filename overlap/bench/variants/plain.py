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


def _plain_ddp(setup: TrainingSetup) -> TrainingLoop:
    return setup.plain_loop(setup.ddp())


ddp_sgd = variant("ddp-sgd", optimizer="sgd")(_plain_ddp)
ddp_sgd_fused = variant("ddp-sgd-fused", optimizer="sgd-fused")(_plain_ddp)
ddp_adamw = variant("ddp-adamw", optimizer="adamw")(_plain_ddp)
ddp_adamw_fused = variant("ddp-adamw-fused", optimizer="adamw-fused")(_plain_ddp)
