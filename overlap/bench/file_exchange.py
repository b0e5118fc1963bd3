"""Small values that ranks exchange through files, so that they are not counted as traffic."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FileExchange"]

_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class FileExchange:
    """One rank's end of it; `folder` is the same for all ranks."""

    folder: Path
    rank: int
    ranks: int

    def exchange(self, name: str, value: Any, *, timeout_s: float) -> list[Any]:
        """Leaves `value`, which must be JSON, under `name`; waits for every rank's, and returns them by rank."""
        mine = self._path(name, self.rank)
        # Renamed into place: nobody reads half a file.
        mine.with_suffix(".part").write_text(json.dumps(value))
        mine.with_suffix(".part").rename(mine)
        deadline = time.monotonic() + timeout_s
        for rank in range(self.ranks):
            while not self._path(name, rank).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not reach {name!r} within {timeout_s:.0f} s")
                time.sleep(_POLL_S)
        return [json.loads(self._path(name, rank).read_text()) for rank in range(self.ranks)]

    def _path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}.json"
