"""What was found: parts, their cases, and tables of rows; one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["CaseReport", "PartReport", "Report", "Row", "Status"]

Status = Literal["ok", "failed", "crashed", "hung", "not run"]
Row = dict[str, Any]


@dataclass(kw_only=True)
class CaseReport:
    """One case of a part, and how it ended."""

    name: str
    status: Status
    why: str = ""
    wall_s: float = 0.0


@dataclass(kw_only=True)
class PartReport:
    """One part: its cases, and what they found."""

    name: str
    title: str
    about: str = ""
    status: str = "not run"
    """``ok``, ``partly`` (some cases did not end well), ``failed`` (none did) or ``not run``."""
    why: str = ""
    wall_s: float = 0.0
    limit_s: float = 0.0
    cases: list[CaseReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def add_row(self, table: str, cells: Row) -> None:
        """A row with the same first cell is made longer."""
        rows = self.tables.setdefault(table, [])
        key, value = next(iter(cells.items()))
        for row in rows:
            if row.get(key) == value:
                row.update(cells)
                return
        rows.append(dict(cells))

    def add(self, event: str, said: Mapping[str, Any]) -> None:
        """Takes in what a worker has said that it found."""
        if event == "row":
            self.add_row(said["table"], said["cells"])
        elif event == "note" and said["text"] not in self.notes:
            self.notes.append(said["text"])
        elif event == "data":
            self.data[said["name"]] = said["value"]
        elif event == "file" and said["name"] not in self.files:
            self.files.append(said["name"])

    @property
    def is_wrong(self) -> bool:
        """Whether anything that was run did not end well; what there was no time for, or no means, does not count."""
        return self.status == "failed" or any(case.status not in ("ok", "not run") for case in self.cases)

    def settle(self) -> None:
        """Works out the part's status from those of its cases."""
        ran = [case.status == "ok" for case in self.cases if case.status != "not run"]
        if ran:
            self.status = "ok" if sum(ran) == len(self.cases) else "partly" if any(ran) else "failed"


@dataclass(kw_only=True)
class Report:
    """All of it; written after every part, so that what ends the run costs only what had not been run."""

    started: str
    device: str
    size: str
    budget_s: float
    wall_s: float = 0.0
    is_over: bool = False
    parts: list[PartReport] = field(default_factory=list)

    def save(self, path: Path) -> None:
        # Renamed into place: nobody reads half a file.
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.rename(path)

    @classmethod
    def load(cls, path: Path) -> Report:
        raw = json.loads(path.read_text())
        parts = [
            PartReport(**{**part, "cases": [CaseReport(**case) for case in part["cases"]]}) for part in raw["parts"]
        ]
        return cls(**{**raw, "parts": parts})
