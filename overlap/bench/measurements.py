"""What all ranks together have measured, and the file in which rank 0 leaves it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Measurements"]

_FILE = "measurements.json"


@dataclass(kw_only=True)
class Measurements:
    """Lists are by rank; a variant is in `trials`, and then timed, or in `failures`."""

    # `ModelProfile`s.
    profiles: list[dict[str, Any]] = field(default_factory=list)
    # `Trial`s.
    trials: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # For each group of variants timed together, samples by variant: of each block, the time of its slowest rank.
    timings: list[dict[str, list[float]]] = field(default_factory=list)

    def save(self, folder: str) -> None:
        (Path(folder) / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: str) -> Measurements:
        return cls(**json.loads((Path(folder) / _FILE).read_text()))

    def timing_of(self, name: str) -> dict[str, list[float]] | None:
        """The group that counts for variant `name`: a baseline may be in several, and counts in the largest."""
        return max((samples for samples in self.timings if name in samples), key=len, default=None)
