"""What a collective costs against what it sends: measurements, and a line through them, latency and bandwidth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Line", "Link", "fit"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """``latency_ms + sent bytes / bytes_per_ms``, for the bytes that a rank sends."""

    latency_ms: float
    bytes_per_ms: float
    points: tuple[tuple[int, float], ...] = ()
    """What it was fitted to: sent bytes, and ms; ascending."""

    def ms(self, sent_bytes: float) -> float:
        """As it was measured, between two sizes in proportion; by the line where nothing was.

        Algorithms change with the size and links have buffers, so that a line can be off by a half where both its ends
        are right.
        """
        if len(self.points) < 2:
            return self._on_line(sent_bytes)
        if sent_bytes <= self.points[0][0]:
            return self.points[0][1]
        above = next((place for place, (sent, _) in enumerate(self.points) if sent >= sent_bytes), len(self.points) - 1)
        (less, less_ms), (more, more_ms) = self.points[above - 1 : above + 1]
        # If more bytes took no longer, a measurement was disturbed, and the two say nothing about larger sizes.
        slope = max(more_ms - less_ms, 0.0) / (more - less) or more_ms / more
        return less_ms + (sent_bytes - less) * slope

    @property
    def residuals(self) -> tuple[float, ...]:
        """Of each point, how far the line is from it, as a share of it."""
        return tuple(self._on_line(sent) / ms - 1 for sent, ms in self.points)

    def _on_line(self, sent_bytes: float) -> float:
        return self.latency_ms + sent_bytes / self.bytes_per_ms

    def __str__(self) -> str:
        off = sorted(map(abs, self.residuals))
        told = f" (residuals: median {statistics.median(off):.0%}, at most {off[-1]:.0%})" if off else ""
        return f"{1000 * self.latency_ms:.0f} us + {self.bytes_per_ms * 8e3 / 1e9:.3g} Gbit/s{told}"


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """The line with the least squares of relative residuals; neither latency nor bandwidth is negative.

    >>> line = fit([(1000, 2.0), (10_000, 11.0)])
    >>> round(line.latency_ms, 6), round(line.bytes_per_ms, 6)
    (1.0, 1000.0)
    """
    # In the unknowns latency and ms a byte, each equation divided by its own time.
    one = sum(1 / ms**2 for _, ms in points)
    x = sum(sent / ms**2 for sent, ms in points)
    xx = sum(sent**2 / ms**2 for sent, ms in points)
    y, xy = sum(1 / ms for _, ms in points), sum(sent / ms for sent, ms in points)
    determinant = one * xx - x * x
    latency_ms = (y * xx - x * xy) / determinant if determinant > 0 else 0.0
    ms_a_byte = (one * xy - x * y) / determinant if determinant > 0 else 0.0
    if latency_ms < 0 or determinant <= 0:
        latency_ms, ms_a_byte = 0.0, xy / xx
    if ms_a_byte <= 0:
        latency_ms, ms_a_byte = y / one, 0.0
    return Line(latency_ms=latency_ms, bytes_per_ms=1 / ms_a_byte if ms_a_byte else math.inf, points=tuple(points))


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the ranks."""

    ranks: int
    all_reduce: Line
    messages: Line
    """Reduce-scatters, gathers and what wires exchange."""
    compute_rate: float = 1.0
    """How fast a rank computes while it sends, as a share of its speed alone."""
    send_rate: float = 1.0
    """How fast the link is while the rank computes."""
    delay_ms: float = 0.0
    """How much longer each collective takes besides, while the rank computes."""
    where: str = ""

    def ms(self, kind: str, sent_bytes: float) -> float:
        """The time of a collective called ``kind``."""
        line = self.all_reduce if kind == "all_reduce" else self.messages
        return line.ms(sent_bytes) if sent_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Link:
        fields = dict(values)
        lines = {
            name: Line(**{**values[name], "points": tuple(map(tuple, values[name]["points"]))})
            for name in ("all_reduce", "messages")
        }
        return cls(**{**fields, **lines})
