"""What a part is given: the device, the sizes, the time, and where to say what it found."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.sizes import SIZES, Sizes

__all__ = ["Given", "Skipped", "Spec"]

Cell = str | int | float | bool | None


class Skipped(Exception):
    """A case cannot be run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a worker is told when it is started; it crosses to the process as JSON."""

    module: str
    """Of the part."""
    device: str
    size: str
    ranks: int
    skip: tuple[str, ...]
    """Cases that were run before, by a worker that ended in one of them."""
    until: float
    """Unix time at which the part is stopped."""
    scratch: str
    """A folder that the processes share that run at the same time."""
    shared: str
    """A folder that those share, too, that come after one of them has failed."""
    folder: str
    """That of the report, for pictures."""


@dataclass(kw_only=True)
class Given:
    """One worker's side of the conversation: every line that it writes is one JSON object."""

    spec: Spec
    rank: int
    lines: IO[str]
    case: str = ""
    failures: list[str] = field(default_factory=list)
    """Of the case that is run."""

    @property
    def device(self) -> str:
        """``"cuda"``, or ``"cpu"`` in its place."""
        return self.spec.device

    @property
    def ranks(self) -> int:
        return self.spec.ranks

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.spec.size]

    @property
    def scratch(self) -> Path:
        return Path(self.spec.scratch)

    @property
    def shared(self) -> Path:
        return Path(self.spec.shared)

    @property
    def folder(self) -> Path:
        return Path(self.spec.folder)

    @property
    def left_s(self) -> float:
        """How long until the part is stopped."""
        return self.spec.until - time.time()

    def row(self, table: str, cells: Mapping[str, Cell]) -> None:
        """Adds a row to a table of the report; a row with the same first cell is made longer."""
        self.say("row", table=table, cells=dict(cells))

    def note(self, text: str) -> None:
        """Adds a sentence to the part's text."""
        self.say("note", text=text)

    def data(self, name: str, value: Any) -> None:
        """Keeps what only the JSON holds."""
        self.say("data", name=name, value=value)

    def file(self, name: str) -> None:
        """Names a file that the part has left in the report's folder."""
        self.say("file", name=name)

    def wrong(self, why: str) -> None:
        """What is run is found to be wrong; it goes on, and the case counts as failed."""
        self.failures.append(why)

    def say(self, event: str, **values: Any) -> None:
        self.lines.write(json.dumps({"event": event, "case": self.case, **values}) + "\n")
        self.lines.flush()
