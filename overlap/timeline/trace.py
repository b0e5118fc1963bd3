"""Reports in the Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap.timeline.report import Interval, Report, StepReport, lanes

__all__ = ["save_trace", "trace_events"]

_STAGES = "updates and other code of stages"


def save_trace(reports: Mapping[str, Report], path: str | Path) -> None:
    """Write all steps of ``reports``, times in microseconds from the first step's start."""
    text = json.dumps({"traceEvents": list(trace_events(reports)), "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def trace_events(reports: Mapping[str, Report]) -> Iterator[dict[str, Any]]:
    """The events of the trace: a rank of a report is a process, and a lane of it a thread."""
    ranks = [(f"{title}, rank {rank}", of) for title, report in reports.items() for rank, of in enumerate(report.ranks)]
    for process, (name, steps) in enumerate(ranks):
        yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}
        for event in _rank_events(steps):
            yield {**event, "pid": process}


def _rank_events(steps: Sequence[StepReport]) -> Iterator[dict[str, Any]]:
    yield _thread(0, "compute")
    for step in steps:
        facts = {
            "exposed communication ms": round(step.exposed_ms, 3),
            "communication ms": round(step.communication_ms, 3),
            "sent bytes": step.sent_bytes,
        }
        yield _slice(f"step {step.step}", step, Interval(0.0, step.step_ms), 0, facts)
        for phase in step.phases:
            yield _slice(phase.name, step, phase, 0, {})
        for bucket in step.buckets:
            ready_us = _us(step.start_ms + bucket.ready_ms)
            yield {"name": f"bucket {bucket.index} ready", "ph": "i", "s": "t", "ts": ready_us, "tid": 0}
    for first, name, is_collective in ((100, "communication", True), (200, _STAGES, False)):
        shown = [
            (step, bucket, one)
            for step in steps
            for bucket in step.buckets
            for one in bucket.activities
            if one.is_collective is is_collective
        ]
        # Slices that overlap without one being inside the other cannot be shown in one thread.
        places = lanes([Interval(step.start_ms + one.start_ms, step.start_ms + one.end_ms) for step, _, one in shown])
        for place in sorted(set(places)):
            yield _thread(first + place, name if place == 0 else f"{name} ({place + 1})")
        for (step, bucket, one), place in zip(shown, places, strict=True):
            details: dict[str, Any] = {"step": step.step, "bucket": bucket.index, "for": one.kind}
            if is_collective:
                details |= {"sent bytes": one.sent_bytes, "gradient bytes": bucket.gradient_bytes}
            yield _slice(f"{one.label}[bucket {bucket.index}]", step, one, first + place, details)


def _thread(thread: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": name}}


def _slice(name: str, step: StepReport, interval: Interval, thread: int, facts: dict[str, Any]) -> dict[str, Any]:
    start_us, end_us = (_us(step.start_ms + moment_ms) for moment_ms in (interval.start_ms, interval.end_ms))
    event = {"name": name, "ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3), "tid": thread}
    return {**event, "args": facts} if facts else event


def _us(moment_ms: float) -> float:
    return round(moment_ms * 1e3, 3)
