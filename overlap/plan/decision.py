"""The rule by which a race is decided, and the plan: what was chosen, from which measurements, and why."""

from __future__ import annotations

import json
import math
import statistics
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch.nn.parallel import DistributedDataParallel

from overlap.errors import ConfigurationError
from overlap.plan.candidates import METHODS, PLAIN, Candidate

__all__ = ["MARGIN", "Plan", "Row", "decide", "is_surely_faster", "quartiles"]

MARGIN = 0.02
"""By how much a candidate must be faster than plain DDP to take its place."""
# How often a candidate that is no faster may win so many rounds.
_CHANCE = 1 / 32
_VERSION = 2
_HEADINGS = ("candidate", "update", "ms a step", "of plain DDP", "rounds", "memory MB", "result")
_plans: weakref.WeakKeyDictionary[DistributedDataParallel, Plan] = weakref.WeakKeyDictionary()


def is_surely_faster(ratios: Sequence[float]) -> bool:
    """Whether steps that took these parts of plain DDP's are faster by more than the noise.

    The median must be at most 0.98, and so many rounds won that it would happen to a candidate that is no faster once
    in 32 times (the sign test, which knows nothing of how noise is distributed): 5 of 5, 9 of 10, 21 of 30.

    >>> is_surely_faster([0.9, 0.95, 0.9, 0.97, 0.96])
    True
    >>> is_surely_faster([0.9, 0.95, 0.9, 0.97, 1.01]), is_surely_faster([0.9, 0.9, 0.9, 0.9])
    (False, False)
    """
    rounds, won = len(ratios), sum(ratio < 1 for ratio in ratios)
    by_chance = sum(math.comb(rounds, count) for count in range(won, rounds + 1)) / 2**rounds
    return bool(ratios) and statistics.median(ratios) <= 1 - MARGIN and by_chance <= _CHANCE


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate and its last heat of the race."""

    method: str
    bucket_cap_mb: float | None
    measured_ms: float | None = None
    """A step, by the median of the rounds; ``None`` if it was not raced."""
    ratio: list[float] | None = None
    """Its step as a part of plain DDP's in the same round: lower quartile, median, upper quartile."""
    rounds: int = 0
    memory_bytes: int
    """An estimate, without activations."""
    note: str = ""
    """Why it was not raced, or may not be chosen."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.method, self.bucket_cap_mb)

    @property
    def kind(self) -> str:
        return METHODS[self.method].kind

    @property
    def update(self) -> str:
        return METHODS[self.method].update


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return [*values] * 3
    return [round(value, 4) for value in statistics.quantiles(values, method="inclusive")]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, with the measurements that it was made from. ``print(plan)`` shows the table and the reason.

    >>> plan = Plan(method="ddp", bucket_cap_mb=None, ranks=2, rows=(), reason="plain DDP was fastest")
    >>> plan.candidate
    Candidate(method='ddp', bucket_cap_mb=None)
    """

    method: str
    """A name in the table's first column."""
    bucket_cap_mb: float | None
    """DDP's option of that name."""
    ranks: int
    rows: tuple[Row, ...]
    reason: str
    compute: str = ""
    """The computation of a step and the link, as text."""
    parameters: int | None = None
    """How many tensors are trained."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method={self.method!r} is not one of {', '.join(METHODS)}")

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.method, self.bucket_cap_mb)

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> Plan:
        """The plan from which :func:`overlap.auto` made ``ddp``.

        Raises:
            ConfigurationError: it made no such model.
        """
        plan = _plans.get(ddp)
        if plan is None:
            raise ConfigurationError("overlap.auto has not made this model: give the first that it returned")
        return plan

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Have :meth:`of` find it."""
        _plans[ddp] = self

    def to_json(self) -> dict[str, Any]:
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        fields = dict(values)
        if (version := fields.pop("version", None)) != _VERSION:
            raise ValueError(f"it is of version {version}, this is version {_VERSION}: leave plan out, and choose anew")
        return cls(**{**fields, "rows": tuple(Row(**row) for row in fields["rows"])})

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for :meth:`load`; one rank is enough, since all have the same."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` wrote.

        Raises:
            ConfigurationError: the file is not there, or holds something else.
        """
        try:
            return cls.of_json(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{str(path)!r} is not a plan that Plan.save wrote: {error}") from None

    def table(self) -> str:
        """The rows as text, the chosen one marked."""
        lines = [("", *_HEADINGS), *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        left = {0, 1, 2, 7}
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def _cells(self, row: Row) -> tuple[str, ...]:
        return (
            ">" if row.candidate == self.candidate else "",
            str(row.candidate),
            row.update,
            "-" if row.measured_ms is None else f"{row.measured_ms:.2f}",
            "-" if row.ratio is None else "{1:.3f} ({0:.3f} to {2:.3f})".format(*row.ratio),
            str(row.rounds or "-"),
            f"{row.memory_bytes / 1e6:.0f}",
            f"{row.kind}{f' ({row.note})' if row.note else ''}",
        )

    def __str__(self) -> str:
        return "\n".join([self.table(), "", self.reason, *([self.compute] if self.compute else [])])

    def draw(self, path: str | Path) -> None:
        """Draw a bar for each measured step into a file, with matplotlib."""
        # Without a window system: training runs on servers.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = [row for row in self.rows if row.measured_ms is not None]
        figure = Figure(figsize=(9.5, 1.9 + 0.34 * len(rows)), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots()
        names = [f"{row.candidate} ({row.kind})" for row in rows]
        colors = ["#59a75a" if row.candidate == self.candidate else "#4a90c2" for row in rows]
        axes.bar_label(axes.barh(names, [row.measured_ms for row in rows], color=colors), fmt="%.2f")
        axes.invert_yaxis()
        axes.set_xlabel(f"ms a step; {self.compute}")
        axes.set_title(f"{self.ranks} ranks: {self.reason}", fontsize=10, loc="left", wrap=True)
        figure.savefig(path)


def decide(
    rows: Sequence[Row], ratios: Sequence[float], *, last: Candidate | None, needed_s: float | None
) -> tuple[Candidate, str]:
    """The candidate to build, and the reason.

    ``rows`` are of all candidates, and those with a note may not be chosen; ``last`` was in the race's last heat, with
    these ``ratios``; ``needed_s`` is how long choosing takes with a race, where there was no time for one.

    Raises:
        ConfigurationError: no candidate may be chosen.
    """
    fitting = [row.candidate for row in rows if not row.note]
    if not fitting:
        words = "; ".join(f"{row.candidate}: {row.note}" for row in rows)
        raise ConfigurationError(f"no candidate takes this model: {words}")
    more = ""
    if needed_s is not None:
        more = f" There was no time for a race of such long steps; seconds={math.ceil(needed_s)} gives it."
    won, took = sum(ratio < 1 for ratio in ratios), ""
    if ratios:
        took = "took {1:.3f} of plain DDP's step (quartiles {0:.3f} and {2:.3f})".format(*quartiles(ratios))
    if PLAIN in fitting and last is None:
        return PLAIN, f"Plain DDP stays: no other candidate that may be faster was raced.{more}"
    if PLAIN in fitting and not is_surely_faster(ratios):
        return PLAIN, (
            f"Plain DDP stays: the best of the others, {last}, {took} and won {won} of {len(ratios)} rounds. That is "
            f"within the noise, or more than {1 - MARGIN:.2f}."
        )
    chosen = fitting[0] if last is None else last
    reason = f"{chosen} was chosen: plain DDP may not be, and there was no race.{more}"
    if last is not None:
        reason = f"{chosen} was chosen: it {took} and won {won} of {len(ratios)} rounds."
    if not METHODS[chosen.method].is_deferred:
        reason += (
            " It updates in backward: a loop that clips, scales or skips between backward and step, or runs several "
            "backwards a step, needs updates='step'."
        )
    return chosen, reason
