"""The curves of a race, kept in a JSON cell by cell, so that a race can be continued."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from overlap.errors import ConfigurationError

OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Course:
    """The settings of one table: two cells of one course can be compared."""

    task: str
    data: str
    model: str
    parameters: int
    # First channels of ResNet-18, or the width of a Transformer.
    width: int
    ranks: int
    # Of each rank's link, or None where it was not shaped.
    bandwidth: str | None
    # Of all ranks together, so that every number of ranks trains alike.
    batch_size: int
    steps: int
    evaluate_every: int
    # The processor, its cores and torch's version: times of two machines do not belong in one table.
    machine: str
    # The highest of the schedule; None: the task's own.
    learning_rate: float | None = None

    @property
    def link(self) -> str:
        return "loopback, not shaped" if self.bandwidth is None else f"links of {self.bandwidth}"


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
    """The cells of a file by course, empty if the file does not exist.

    Raises:
        ConfigurationError: the file is not one that a race has saved.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.courses: dict[Course, list[Cell]] = {}
        if not path.exists():
            return
        names = [entry.name for entry in fields(Course)]
        try:
            for raw in json.loads(path.read_text())["courses"]:
                self.courses[Course(**{name: raw[name] for name in names})] = [_cell(cell) for cell in raw["cells"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{str(path)!r} holds no results of a race ({type(error).__name__}: {error}): move it away, or give "
                "another --output"
            ) from None

    def is_done(self, course: Course, contestant: str, seed: int) -> bool:
        """Whether there is a curve; a training that failed is tried again."""
        cells = self.courses.get(course, ())
        return any((one.contestant, one.seed, one.status) == (contestant, seed, OK) for one in cells)

    def add(self, course: Course, cell: Cell) -> None:
        """Adds a cell, in place of one of the same contestant and seed, and saves all."""
        cells = self.courses.setdefault(course, [])
        cells[:] = [one for one in cells if (one.contestant, one.seed) != (cell.contestant, cell.seed)]
        cells.append(cell)
        raw = [{**asdict(each), "cells": [asdict(one) for one in own]} for each, own in self.courses.items()]
        # Renamed into place, so that a race that is interrupted does not leave half a file.
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"courses": raw}, indent=1, allow_nan=False) + "\n")
        part.rename(self._path)


def _cell(raw: dict[str, Any]) -> Cell:
    return Cell(**{**raw, "seconds": tuple(raw["seconds"]), "metric": tuple(raw["metric"])})
