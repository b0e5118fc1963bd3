"""A report as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from overlap.timeline.report import BucketReport, Report, StepReport
from overlap.timeline.spans import Interval

__all__ = ["report_table", "step_title"]

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


def report_table(report: Report) -> str:
    """Every step in a line, and the buckets of rank 0's median step."""
    ranks = len(report.ranks)
    lines = [f"{report.plan} on {ranks} {'rank' if ranks == 1 else 'ranks'}, times in ms"]
    number = report.median_step()
    if number is None:
        return f"{lines[0]}\nno step was recorded"
    lines += _aligned([_STEP_COLUMNS, *map(_step_row, report.steps)])
    for step in report.of_step(number)[:1]:
        lines += ["", f"buckets of step {number} on rank {step.rank}, from the step's start"]
        lines += _aligned([_BUCKET_COLUMNS, *map(_bucket_row, step.buckets)])
    return "\n".join(lines)


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
