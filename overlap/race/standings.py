"""What the curves of a course say about a target: who reaches it when, and who never does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from overlap.race.contestants import BASELINE
from overlap.race.results import OK, Cell
from overlap.race.task import Metric

__all__ = ["Standing", "standings", "time_to_target_s"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One contestant over its seeds. Times are infinite where a seed never reached the target."""

    contestant: str
    # Of each seed that was trained, in their order.
    times_s: tuple[float, ...]
    # The median over seeds of the time over plain DDP's with the same seed; None where that cannot be said.
    ratio: float | None
    # Steps to the target, the median over seeds.
    steps: float
    # Of the whole training, the median over seeds.
    sent_bytes: float | None
    final: float | None
    # What went wrong, where something did.
    failure: str | None

    @property
    def time_s(self) -> float:
        """The median, infinite where most seeds never reached the target."""
        return statistics.median(self.times_s) if self.times_s else math.inf

    @property
    def reached(self) -> int:
        """How many seeds reached the target."""
        return sum(math.isfinite(time_s) for time_s in self.times_s)


def time_to_target_s(cell: Cell, metric: Metric, target: float) -> float:
    """Seconds of training until the first evaluation that reaches the target; infinite where none does."""
    place = _first(cell, metric, target)
    return math.inf if place is None else cell.seconds[place]


def standings(
    cells: Sequence[Cell], names: Sequence[str], metric: Metric, target: float, *, evaluate_every: int, steps: int
) -> list[Standing]:
    """A line for each of ``names`` that has a cell, in their order."""
    baseline = {
        cell.seed: time_to_target_s(cell, metric, target)
        for cell in cells
        if cell.contestant == BASELINE and cell.status == OK
    }
    found = []
    for name in names:
        own = sorted((cell for cell in cells if cell.contestant == name), key=lambda cell: cell.seed)
        if not own:
            continue
        done = [cell for cell in own if cell.status == OK]
        times_s = tuple(time_to_target_s(cell, metric, target) for cell in done)
        places = [_first(cell, metric, target) for cell in done]
        finals = [cell.metric[-1] for cell in done]
        found.append(
            Standing(
                contestant=name,
                times_s=times_s,
                ratio=_ratio({cell.seed: time_s for cell, time_s in zip(done, times_s, strict=True)}, baseline),
                steps=_median([math.inf if place is None else min(steps, place * evaluate_every) for place in places]),
                sent_bytes=_median([float(cell.sent_bytes or 0) for cell in done]) if done else None,
                final=_final(finals, metric) if done else None,
                failure=next((cell.status for cell in own if cell.status != OK), None),
            )
        )
    return found


def _first(cell: Cell, metric: Metric, target: float) -> int | None:
    return next((place for place, value in enumerate(cell.metric) if metric.reaches(value, target)), None)


def _ratio(times_s: dict[int, float], baseline: dict[int, float]) -> float | None:
    """Seed by seed, so that a change of the machine's load between seeds falls on both."""
    both = [seed for seed in times_s if seed in baseline]
    if not both or not all(0 < baseline[seed] < math.inf for seed in both):
        return None
    ratio = statistics.median(times_s[seed] / baseline[seed] for seed in both)
    return ratio if math.isfinite(ratio) else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.inf


def _final(values: Sequence[float | None], metric: Metric) -> float | None:
    """The median; a value that was not finite counts as worse than any."""
    worst = -math.inf if metric.higher_is_better else math.inf
    middle = statistics.median(worst if value is None else value for value in values)
    return middle if math.isfinite(middle) else None
