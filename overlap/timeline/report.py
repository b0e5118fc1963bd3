"""The recorded steps of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from overlap.timeline.steps import StepReport
from overlap.timeline.table import bucket_rows, step_rows

__all__ = ["Report"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The recorded steps of all ranks; ``print`` it for a table."""

    title: str
    """The ``repr`` of what was registered with the model, or ``"plain DDP"``."""
    ranks: tuple[tuple[StepReport, ...], ...]
    """By rank, in the order of the steps."""

    @property
    def steps(self) -> tuple[StepReport, ...]:
        """The steps of all ranks."""
        return tuple(step for steps in self.ranks for step in steps)

    def median_step(self) -> int | None:
        """The number of the step that took rank 0 the median time; ``None`` where nothing was recorded.

        The first steps, in which DDP makes its buckets, do not come into it where there are enough others.
        """
        steps = sorted(self.ranks[0][2:] or self.ranks[0], key=lambda step: step.step_ms)
        return steps[(len(steps) - 1) // 2].step if steps else None

    def of_step(self, number: int) -> tuple[StepReport, ...]:
        """One step on every rank that recorded it."""
        return tuple(step for step in self.steps if step.step == number)

    def __str__(self) -> str:
        """Every step in a line, and the buckets of rank 0's median step."""
        ranks = len(self.ranks)
        heading = f"{self.title} on {ranks} {'rank' if ranks == 1 else 'ranks'}, times in ms"
        number = self.median_step()
        if number is None:
            return f"{heading}\nno step was recorded"
        lines = [heading, *step_rows(self.steps)]
        for step in self.of_step(number)[:1]:
            lines += ["", f"buckets of step {number} on rank {step.rank}, from the step's start", *bucket_rows(step)]
        return "\n".join(lines)
