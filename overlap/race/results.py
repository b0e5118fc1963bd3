"""The curves of a race, kept in a JSON cell by cell, so that a race can be interrupted and continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from overlap.errors import ConfigurationError

__all__ = ["OK", "Cell", "Course", "Results"]

OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Course:
    """What the cells of one table have in common: two cells of one course can be compared."""

    task: str
    data: str
    model: str
    parameters: int
    ranks: int
    # Of each rank's link, or None where it was not shaped.
    bandwidth: str | None
    batch_size: int
    steps: int
    evaluate_every: int
    # The processor, its cores and torch's version: times of two machines do not belong in one table.
    machine: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contestant with one seed. Without curves where ``status`` says why."""

    contestant: str
    seed: int
    status: str
    # At the beginning and after every round: seconds of training until then, and the metric.
    seconds: tuple[float, ...] = ()
    metric: tuple[float | None, ...] = ()
    # In the whole training, by the rank that sent most.
    sent_bytes: int | None = None
    # Of the machine before it: other work shows in the times.
    load: float


class Results:
    """All cells in a file, by course."""

    def __init__(self, courses: Mapping[Course, tuple[Cell, ...]]) -> None:
        self.courses = dict(courses)

    def cells(self, course: Course) -> tuple[Cell, ...]:
        return self.courses.get(course, ())

    def is_done(self, course: Course, contestant: str, seed: int) -> bool:
        """Whether there is a curve; what failed is tried again."""
        wanted = contestant, seed
        return any((one.contestant, one.seed) == wanted and one.status == OK for one in self.cells(course))

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """What the file holds, or nothing where there is none.

        Raises:
            ConfigurationError: the file is not one that a race has saved.
        """
        path = Path(path)
        if not path.exists():
            return cls({})
        try:
            raw = json.loads(path.read_text())
            return cls({_course(one): tuple(map(_cell, one["cells"])) for one in raw["courses"]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{str(path)!r} holds no results of a race ({type(error).__name__}: {error}): move it away, or give "
                "another --output"
            ) from None

    @classmethod
    def add(cls, path: str | Path, course: Course, cell: Cell) -> None:
        """Adds a cell to the file, in place of one of the same contestant and seed."""
        results = cls.load(path)
        others = [one for one in results.cells(course) if (one.contestant, one.seed) != (cell.contestant, cell.seed)]
        results.courses[course] = (*others, cell)
        results.save(path)

    def save(self, path: str | Path) -> None:
        raw = [{**asdict(course), "cells": [asdict(one) for one in cells]} for course, cells in self.courses.items()]
        text = json.dumps({"courses": raw}, indent=1, allow_nan=False)
        # Renamed into place, so that a race that is interrupted does not leave half a file.
        part = Path(path).with_suffix(".part")
        part.write_text(text + "\n")
        part.rename(path)


def _course(raw: dict[str, Any]) -> Course:
    return Course(**{entry.name: raw[entry.name] for entry in fields(Course)})


def _cell(raw: dict[str, Any]) -> Cell:
    return Cell(**{**raw, "seconds": tuple(raw["seconds"]), "metric": tuple(raw["metric"])})
