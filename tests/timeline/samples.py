"""Reports made by hand, and what must hold for every trace."""

from __future__ import annotations

from typing import Any

from overlap.timeline import Activity, BucketReport, Phase, Report, StepReport


def bucket(index: int, ready_ms: float, *activities: Activity) -> BucketReport:
    return BucketReport(index=index, gradient_bytes=1000, ready_ms=ready_ms, activities=activities)


def reduce(start_ms: float, end_ms: float) -> Activity:
    return Activity(start_ms, end_ms, "reduce", "all_reduce", True, 1000)


def update(start_ms: float, end_ms: float) -> Activity:
    return Activity(start_ms, end_ms, "update", "Step(SGD, interleaved)", False)


def step(rank: int = 0, number: int = 0, start_ms: float = 0.0) -> StepReport:
    """Backward ends at 60; the last bucket is reduced at 80 and updated at 85; DDP copies until 90."""
    return StepReport(
        rank=rank,
        step=number,
        start_ms=start_ms,
        step_ms=100.0,
        phases=(
            Phase(0.0, 4.0, "buffers"),
            Phase(4.0, 20.0, "forward"),
            Phase(20.0, 22.0, "loss"),
            Phase(22.0, 60.0, "backward"),
            Phase(60.0, 90.0, "finalization"),
            Phase(92.0, 95.0, "optimizer"),
        ),
        buckets=(
            bucket(0, 40.0, reduce(41.0, 55.0), update(56.0, 57.0)),
            bucket(1, 60.0, reduce(60.0, 80.0), update(80.0, 85.0), update(85.0, 85.1)),
        ),
    )


def report(ranks: int = 2, steps: int = 3) -> Report:
    return Report(
        title="plain DDP",
        ranks=tuple(
            tuple(step(rank, number, 100.0 * number + rank) for number in range(steps)) for rank in range(ranks)
        ),
    )


def assert_slices_nest(events: list[dict[str, Any]]) -> None:
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            start_ns = round(1e3 * event["ts"])
            slices = threads.setdefault((event["pid"], event["tid"]), [])
            slices.append((start_ns, start_ns + round(1e3 * event["dur"])))
    for slices in threads.values():
        around: list[int] = []
        for start_ns, end_ns in sorted(slices, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= start_ns:
                around.pop()
            assert not around or end_ns <= around[-1]
            around.append(end_ns)
