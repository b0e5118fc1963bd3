"""What was chosen and why."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from torch.nn.parallel import DistributedDataParallel

from overlap.errors import ConfigurationError
from overlap.plan.candidates import METHODS, Candidate

__all__ = ["Plan", "Row"]

_VERSION = 1
_HEADINGS = ("candidate", "update", "predicted", "measured", "sent MB", "memory MB", "result")
_plans: weakref.WeakKeyDictionary[DistributedDataParallel, Plan] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate, with times in ms a step; ``note`` says why it was not to be chosen."""

    method: str
    bucket_cap_mb: float | None
    kind: str
    update: str
    predicted_ms: float
    measured_ms: float | None = None
    sent_bytes: int
    memory_bytes: int
    note: str = ""

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.method, self.bucket_cap_mb)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, with all that it was made from. ``print(plan)`` shows the table and the reason.

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
    link: str = ""
    """The collectives' costs, in words."""
    compute: str = ""
    """The step's computation, in words."""
    seconds: float = 0.0
    """How long choosing took."""
    parameters: int | None = None
    """How many tensors are trained."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method={self.method!r} is not one of {', '.join(METHODS)}")

    @property
    def candidate(self) -> Candidate:
        """What was chosen."""
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
            raise ValueError(f"version {version}, and this is version {_VERSION}")
        return cls(**{**fields, "rows": tuple(Row(**row) for row in fields["rows"])})

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for :meth:`load`; one rank is enough, since all have the same."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote.

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
            f"{row.predicted_ms:.2f} ms",
            "-" if row.measured_ms is None else f"{row.measured_ms:.2f} ms",
            f"{row.sent_bytes / 1e6:.2f}",
            f"{row.memory_bytes / 1e6:.0f}",
            f"{row.kind}{f' ({row.note})' if row.note else ''}",
        )

    def __str__(self) -> str:
        told = [self.table(), "", self.reason]
        told += [line for line in (f"computing: {self.compute}", f"link: {self.link}") if not line.endswith(": ")]
        return "\n".join(told)
