"""Steps and buckets as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from overlap.timeline.spans import Interval
from overlap.timeline.steps import BucketReport, StepReport

__all__ = ["bucket_rows", "step_rows", "step_title"]

_STEP_COLUMNS = (
    "rank",
    "step",
    "step ms",
    "forward",
    "backward",
    "finalization",
    "optimizer",
    "communication",
    "exposed",
    "overlapped",
    "sent MB",
)
_BUCKET_COLUMNS = ("bucket", "MB", "ready ms", "reduce", "update", "gather", "sent MB")


def step_rows(steps: Sequence[StepReport]) -> list[str]:
    """A heading, and a line for each step."""
    return _aligned([_STEP_COLUMNS, *map(_step_row, steps)])


def bucket_rows(step: StepReport) -> list[str]:
    """A heading, and a line for each bucket of ``step``."""
    return _aligned([_BUCKET_COLUMNS, *map(_bucket_row, step.buckets)])


def step_title(steps: Sequence[StepReport]) -> str:
    """A step of several ranks in one line."""
    step_ms, exposed_ms, communication_ms = (
        fmean(getattr(step, name) for step in steps) for name in ("step_ms", "exposed_ms", "communication_ms")
    )
    ranks = f"mean of {len(steps)} ranks: " if len(steps) > 1 else ""
    words = f"{ranks}step {step_ms:.1f} ms, communication {communication_ms:.1f} ms, of it exposed {exposed_ms:.1f} ms"
    return f"{words} ({1 - exposed_ms / communication_ms:.0%} overlapped)" if communication_ms else words


def _step_row(step: StepReport) -> tuple[str, ...]:
    fraction = step.overlap_fraction
    return (
        str(step.rank),
        str(step.step),
        f"{step.step_ms:.1f}",
        f"{step.phase_ms('forward'):.1f}",
        f"{step.phase_ms('backward'):.1f}",
        f"{step.phase_ms('finalization'):.1f}",
        f"{step.phase_ms('optimizer'):.1f}",
        f"{step.communication_ms:.1f}",
        f"{step.exposed_ms:.1f}",
        "-" if fraction is None else f"{fraction:.0%}",
        f"{step.sent_bytes / 1e6:.2f}",
    )


def _bucket_row(bucket: BucketReport) -> tuple[str, ...]:
    return (
        str(bucket.index),
        f"{bucket.gradient_bytes / 1e6:.2f}",
        f"{bucket.ready_ms:.1f}",
        _span(bucket.reduce),
        _span(bucket.update),
        _span(bucket.gather),
        f"{bucket.sent_bytes / 1e6:.2f}",
    )


def _span(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.start_ms:.1f} to {interval.end_ms:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
