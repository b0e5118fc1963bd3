"""What a variant is: a row of the table, what it is compared with, and the function that builds its training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from overlap.bench.settings import Settings
from overlap.bench.training_setup import TrainingLoop, TrainingSetup

__all__ = ["COMPUTE_ONLY", "FloorKind", "Variant", "variant"]

COMPUTE_ONLY = "compute-only"
FloorKind = Literal["compute", "bucketed", "streamed"]
Build = Callable[[TrainingSetup], TrainingLoop]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table; see `variant` for the fields."""

    name: str
    build: Build
    optimizer: str | None
    baseline: str | None
    floor: FloorKind
    block_steps: int
    lead_in_steps: int
    timed_alone: bool
    backends: tuple[str, ...]

    def optimizer_name(self, settings: Settings) -> str:
        return self.optimizer or settings.optimizer

    def baseline_name(self, settings: Settings) -> str:
        if self.baseline is not None:
            return self.baseline
        # AdamW rows are compared with the fastest plain AdamW, whichever kernel they use themselves.
        optimizer = self.optimizer_name(settings)
        return f"ddp-{optimizer}" if optimizer.startswith("sgd") else "ddp-adamw-fused"


def variant(
    name: str,
    *,
    optimizer: str | None = None,
    baseline: str | None = None,
    floor: FloorKind = "bucketed",
    block_steps: int = 1,
    lead_in_steps: int = 0,
    timed_alone: bool = False,
    backends: tuple[str, ...] = ("gloo", "nccl"),
) -> Callable[[Build], Variant]:
    """Makes a variant of the decorated function, which builds the training loop from a `TrainingSetup`.

    Args:
        name: what the row is called, in the table and on the command line.
        optimizer: the one it steps with; by default that of `--optimizer`.
        baseline: the variant its ratio is taken to; by default plain DDP with the same kind of optimizer.
        floor: which bound holds for it: `"bucketed"` where all buckets must be reduced before the step ends,
            `"streamed"` where communication may go on at any time, `"compute"` where there is none.
        block_steps: steps timed together, for a variant whose steps differ (one average in eight, say).
        lead_in_steps: untimed steps before them, for one that leaves work in flight to the next step.
        timed_alone: it may crash at any step, so it is timed with its baselines and no other variant.
        backends: where it can run at all; what a backend merely refuses becomes a row that says so.
    """

    def make(build: Build) -> Variant:
        return Variant(
            name=name,
            build=build,
            optimizer=optimizer,
            baseline=baseline,
            floor=floor,
            block_steps=block_steps,
            lead_in_steps=lead_in_steps,
            timed_alone=timed_alone,
            backends=backends,
        )

    return make
