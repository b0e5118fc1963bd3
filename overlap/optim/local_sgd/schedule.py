"""When ranks average, and which of them with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

from overlap.optim.local_sgd.averagers import check_hierarchy, due_group, make_groups, whole

__all__ = ["Period", "Schedule"]

Period = int | Mapping[int, int] | Callable[[int], int]
"""Steps from one average to the next; or the size of the groups for each period; or a function of the step that a
round begins at, counted from 0, that gives the round's length."""


class Schedule:
    """Counts steps, and says when a round ends and who averages then.

    There is one level of ranks, or with a hierarchy as many as it has periods: level 0 is the smallest group.

    Raises:
        ConfigurationError: ``period`` or ``start_step`` is out of range.
    """

    def __init__(self, period: Period, start_step: int, group: dist.ProcessGroup) -> None:
        self.start_step = whole("start_step", start_step, least=0)
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._period = period
        if isinstance(period, Mapping):
            self._groups = make_groups(check_hierarchy("period", period, group), group)
        elif not callable(period):
            whole("period", period, least=1)
        self._whole_group = group
        self.step = 0
        """Training steps so far: the one counter."""
        self.round_end: int | None = None
        """The step after which ranks average next, once local SGD has started."""

    @property
    def levels(self) -> int:
        return max(1, len(self._groups))

    @property
    def is_local(self) -> bool:
        """Whether the next step is one of local SGD."""
        return self.step >= self.start_step

    def begin_round(self) -> None:
        """Where a round's end is still to be settled, ask the schedule for its length."""
        if self.is_local and self.round_end is None and not self._groups:
            length = self._period(self.step) if callable(self._period) else self._period
            self.round_end = self.step + whole(f"period at step {self.step}", length, least=1)

    def count(self) -> int | None:
        """Count a step; the level that averages after it, if one does."""
        self.begin_round()
        was_local = self.is_local
        self.step += 1
        if not was_local:
            return None
        if self._groups:
            group = due_group(self._groups, self.step - self.start_step)
            return None if group is None else list(self._groups.values()).index(group)
        if self.step != self.round_end:
            return None
        self.round_end = None
        return 0

    def group_of(self, level: int) -> dist.ProcessGroup:
        """The ranks that average at ``level`` with this one."""
        return list(self._groups.values())[level] if self._groups else self._whole_group

    @property
    def summary(self) -> str:
        """The same words on every rank that has the same schedule."""
        if isinstance(self._period, Mapping):
            period = str(dict(self._period))
        elif callable(self._period):
            period = getattr(self._period, "__qualname__", type(self._period).__name__)
        else:
            period = str(self._period)
        return f"period {period} from step {self.start_step}"
