"""What the ranks have measured, and the file in which rank 0 leaves all of it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

from overlap.bench.floor import StepProfile

_FILE = "measurements.pickle"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one rank saw of one variant."""

    sent_bytes_per_step: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What one rank saw of the model itself, and of the link."""

    step: StepProfile
    memory_limit_bytes: int
    # Of an all-reduce on the link, by the bytes that each rank sends.
    link_bytes_per_s: float


@dataclass(kw_only=True)
class Measurements:
    """Lists are by rank; a variant is in `trials`, and then timed, or in `failures`."""

    profiles: list[ModelProfile] = field(default_factory=list)
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # For each group of variants timed together, samples by variant: of each block, the time of its slowest rank.
    timings: list[dict[str, list[float]]] = field(default_factory=list)

    def save(self, folder: str) -> None:
        (Path(folder) / _FILE).write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: str) -> Measurements:
        measurements: Measurements = pickle.loads((Path(folder) / _FILE).read_bytes())
        return measurements

    def timing_of(self, name: str) -> dict[str, list[float]] | None:
        """The group that counts for variant `name`: a baseline may be in several, and counts in the largest."""
        return max((samples for samples in self.timings if name in samples), key=len, default=None)
