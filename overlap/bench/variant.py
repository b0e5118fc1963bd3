"""What a variant is: a row of the table, what it is compared with, and the function that builds its training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from overlap.bench.settings import Settings
from overlap.bench.training_setup import TrainingLoop, TrainingSetup

COMPUTE_ONLY = "compute-only"
FloorKind = Literal["compute", "bucketed", "streamed"]
Build = Callable[[TrainingSetup], TrainingLoop]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    # What it is called, in the table and on the command line.
    name: str
    build: Build
    # The one it steps with; by default that of `--optimizer`.
    optimizer: str | None = None
    # The variant its ratio is taken to; by default plain DDP with the same kind of optimizer.
    baseline: str | None = None
    # Which bound holds: "bucketed" where all buckets must be reduced before the step ends, "streamed" where
    # communication may go on at any time, "compute" where there is none.
    floor: FloorKind = "bucketed"
    # Steps timed together, for a variant whose steps differ (one average in eight, say).
    block_steps: int = 1
    # Untimed steps before them, for one that leaves work in flight to the next step.
    lead_in_steps: int = 0
    # It may crash at any step, so it is timed with its baselines and no other variant.
    timed_alone: bool = False
    # Where it can run at all; what a backend merely refuses becomes a row that says so.
    backends: tuple[str, ...] = ("gloo", "nccl")

    def optimizer_name(self, settings: Settings) -> str:
        return self.optimizer or settings.optimizer

    def baseline_name(self, settings: Settings) -> str:
        if self.baseline is not None:
            return self.baseline
        # AdamW rows are compared with the fastest plain AdamW, whichever kernel they use themselves.
        optimizer = self.optimizer_name(settings)
        return f"ddp-{optimizer}" if optimizer.startswith("sgd") else "ddp-adamw-fused"

    def baseline_16bit_name(self, settings: Settings) -> str:
        """PyTorch's own hook that halves the bytes, with the same kind of optimizer."""
        return "torch-fp16" if self.optimizer_name(settings).startswith("sgd") else "torch-fp16-adamw"


def variant(name: str, **fields: Any) -> Callable[[Build], Variant]:
    """Makes a `Variant` with these fields of the decorated function, which builds its training loop."""
    return lambda build: Variant(name=name, build=build, **fields)
