"""How much less is sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass

__all__ = ["Statistics"]

_logger = logging.getLogger(__name__)


@dataclass
class Statistics:
    """Counts elements before and after compression, over all buckets of all compressed steps."""

    numel_before: int = 0
    numel_after: int = 0
    _next_report: int | None = None

    def count(self, before: int, after: int) -> None:
        """A bucket of ``before`` elements was sent as ``after``."""
        self.numel_before += before
        self.numel_after += after

    @property
    def rate(self) -> float:
        """How many times fewer elements are sent; 0 before anything was."""
        return self.numel_before / self.numel_after if self.numel_after > 0 else 0.0

    def restore(self, numel_before: int, numel_after: int) -> None:
        """Go on from counts that were saved."""
        self.numel_before, self.numel_after = numel_before, numel_after
        self._next_report = None

    def report(self, step: int, every_steps: int) -> None:
        """Log a line when it is due."""
        if self._next_report is None:
            self._next_report = step
        if step < self._next_report:
            return
        self._next_report = step + every_steps
        _logger.info(
            "PowerSGD after step %d: %d elements sent as %d, %.1f times fewer",
            step,
            self.numel_before,
            self.numel_after,
            self.rate,
        )
