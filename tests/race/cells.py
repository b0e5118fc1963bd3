"""Courses and curves that nobody trained."""

from __future__ import annotations

from typing import Any

from overlap.race.results import OK, Cell, Course


def course(**changed: Any) -> Course:
    values: dict[str, Any] = {
        "task": "digits",
        "data": "1437 digits (0123456789ab)",
        "model": "ResNet-18 of width 16",
        "parameters": 700_000,
        "ranks": 2,
        "bandwidth": "100mbit",
        "batch_size": 64,
        "steps": 24,
        "evaluate_every": 8,
        "machine": "a processor, 2 cores, torch 2.13.0",
    }
    return Course(**{**values, **changed})


def cell(contestant: str, seed: int, metric: list[float | None], *, step_s: float = 1.0, sent: int = 1000) -> Cell:
    """A curve of evenly timed rounds."""
    seconds = tuple(step_s * place for place in range(len(metric)))
    return Cell(
        contestant=contestant, seed=seed, status=OK, seconds=seconds, metric=tuple(metric), sent_bytes=sent, load=0.5
    )


def failed(contestant: str, seed: int, status: str) -> Cell:
    return Cell(contestant=contestant, seed=seed, status=status, load=0.5)
