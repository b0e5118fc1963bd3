"""Races of `overlap.auto` whose winner is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["made_faster"]


def made_faster(run: Callable[[Any, int], None], method: str) -> Callable[[Any, int], None]:
    """In the place of :meth:`Race.run`: what is of ``method`` seems to take a hundredth of what it takes."""

    def faked(self: Any, rounds: int) -> None:
        run(self, rounds)
        for candidate, times in self.samples.items():
            if candidate.method == method:
                latest = slice(len(times) - rounds, None)
                times[latest] = [None if ms is None else 0.01 * ms for ms in times[latest]]

    return faked
