"""A file that another process is writing, read line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["Lines"]


class Lines:
    """Each pass over it yields the lines that have been completed since the last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(errors="replace")
        self._begun = ""

    def __iter__(self) -> Iterator[str]:
        *complete, self._begun = (self._begun + self._file.read()).split("\n")
        yield from complete

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
