"""Reports in the Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap.timeline.report import Report
from overlap.timeline.spans import Interval, lanes
from overlap.timeline.steps import Activity, BucketReport, StepReport

__all__ = ["save_trace", "trace_events"]

_COMPUTE, _COMMUNICATION, _STAGES = "compute", "communication", "updates and other code of stages"
# A process is a rank of a report, a thread is a lane of it. Lanes that need several threads get numbers side by side.
_THREADS = {_COMPUTE: 0, _COMMUNICATION: 100, _STAGES: 200}


def save_trace(reports: Mapping[str, Report], path: str | Path) -> None:
    """Write all steps of ``reports``, times in microseconds from the first step's start."""
    text = json.dumps({"traceEvents": list(trace_events(reports)), "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def trace_events(reports: Mapping[str, Report]) -> Iterator[dict[str, Any]]:
    """The events of the trace."""
    process = 0
    for title, report in reports.items():
        for rank, steps in enumerate(report.ranks):
            yield _name("process_name", process, 0, f"{title}, rank {rank}")
            yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}
            yield from _rank_events(steps, process)
            process += 1


def _rank_events(steps: Sequence[StepReport], process: int) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", process, _THREADS[_COMPUTE], _COMPUTE)
    for step in steps:
        yield _slice(f"step {step.step}", Interval(0.0, step.step_ms), step, process, 0, _step_facts(step))
        for phase in step.phases:
            yield _slice(phase.name, phase, step, process, 0, {})
    for lane, is_collective in ((_COMMUNICATION, True), (_STAGES, False)):
        shown = [
            (step, bucket, one)
            for step in steps
            for bucket in step.buckets
            for one in bucket.activities
            if one.is_collective is is_collective
        ]
        # What overlaps without one being inside the other cannot be shown in one thread.
        places = lanes([_moved(one, step.start_ms) for step, _, one in shown])
        for place in range(max(places, default=-1) + 1):
            name = lane if place == 0 else f"{lane} ({place + 1})"
            yield _name("thread_name", process, _THREADS[lane] + place, name)
        for (step, bucket, one), place in zip(shown, places, strict=True):
            facts = _activity_facts(one, bucket, step)
            yield _slice(f"{one.label}[bucket {bucket.index}]", one, step, process, _THREADS[lane] + place, facts)
    for step in steps:
        for bucket in step.buckets:
            yield {
                "name": f"bucket {bucket.index} ready",
                "ph": "i",
                "s": "t",
                "ts": _us(step.start_ms + bucket.ready_ms),
                "pid": process,
                "tid": _THREADS[_COMPUTE],
            }


def _slice(
    name: str, interval: Interval, step: StepReport, process: int, thread: int, facts: dict[str, Any]
) -> dict[str, Any]:
    start_us, end_us = (_us(step.start_ms + moment_ms) for moment_ms in (interval.start_ms, interval.end_ms))
    event = {"name": name, "ph": "X", "ts": start_us, "dur": round(end_us - start_us, 3), "pid": process, "tid": thread}
    return {**event, "args": facts} if facts else event


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _step_facts(step: StepReport) -> dict[str, Any]:
    return {
        "exposed communication ms": round(step.exposed_ms, 3),
        "communication ms": round(step.communication_ms, 3),
        "sent bytes": step.sent_bytes,
    }


def _activity_facts(activity: Activity, bucket: BucketReport, step: StepReport) -> dict[str, Any]:
    facts: dict[str, Any] = {"step": step.step, "bucket": bucket.index, "for": activity.kind}
    if activity.is_collective:
        facts |= {"sent bytes": activity.sent_bytes, "gradient bytes": bucket.gradient_bytes}
    return facts


def _moved(interval: Interval, by_ms: float) -> Interval:
    return Interval(interval.start_ms + by_ms, interval.end_ms + by_ms)


def _us(moment_ms: float) -> float:
    return round(moment_ms * 1e3, 3)
