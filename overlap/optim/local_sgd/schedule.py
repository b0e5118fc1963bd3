"""When ranks average, and which of them with each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch.distributed as dist

from overlap._checks import check_whole_number, told
from overlap.errors import ConfigurationError

__all__ = ["Period", "Schedule", "due_period", "make_groups"]

Period = int | Mapping[int, int] | Callable[[int], int]
"""Steps from one average to the next; or the group size for each period; or a function that takes the step at which a
round begins, counted from 0, and returns the round's length."""


class Schedule:
    """Counts steps; decides when a round ends and which ranks average then.

    Args:
        period: how long rounds are.
        start_step: steps before the first.
        group: all ranks.

    Communication, with a hierarchy: the collectives of making its groups, at construction.
    """

    def __init__(self, period: Period, start_step: int, group: dist.ProcessGroup) -> None:
        self.start_step = check_whole_number("start_step", start_step, least=0)
        self._period = period
        self._groups: dict[int, dist.ProcessGroup] = {}
        if isinstance(period, Mapping):
            self._groups = make_groups("period", period, group)
        elif not callable(period):
            check_whole_number("period", period, least=1)
        self.levels = list(self._groups.values()) or [group]
        """The groups of ranks that average with this one, smallest first; one without a hierarchy."""
        self.step = 0
        """Training steps so far: the only counter of steps."""
        self.round_end: int | None = None
        """The step after which ranks average next, once local SGD has started."""

    @property
    def is_local(self) -> bool:
        """Whether the next step is one of local SGD."""
        return self.step >= self.start_step

    def begin_round(self) -> None:
        """Set the end of the round, unless it is set already."""
        if self.is_local and self.round_end is None and not self._groups:
            length = self._period(self.step) if callable(self._period) else self._period
            self.round_end = self.step + check_whole_number(f"period at step {self.step}", length, least=1)

    def count(self) -> int | None:
        """Count a step; returns the level that averages after it, if one does."""
        self.begin_round()
        was_local = self.is_local
        self.step += 1
        if not was_local:
            return None
        if self._groups:
            due = due_period(self._groups, self.step - self.start_step)
            return None if due is None else list(self._groups).index(due)
        if self.step != self.round_end:
            return None
        self.round_end = None
        return 0

    def __repr__(self) -> str:
        # The same on every rank that has the same schedule.
        if isinstance(self._period, Mapping):
            period = str(dict(self._period))
        elif callable(self._period):
            period = getattr(self._period, "__qualname__", type(self._period).__name__)
        else:
            period = told(self._period)
        return f"period {period} from step {told(self.start_step)}"


def due_period(periods: Mapping[int, object], step: int) -> int | None:
    """The longest of ``periods``, which ascend, that divides ``step``."""
    return next((period for period in reversed(list(periods)) if step % period == 0), None)


def make_groups(name: str, sizes: Mapping[int, int], group: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """For each period the group of so many consecutive ranks of ``group`` that this rank is in; every rank calls it.

    Communication: the collectives of making groups smaller than ``group``, on all ranks of the job.

    Raises:
        ConfigurationError: ``sizes``, which the message calls ``name``, do not fit together; or a group must be made,
            and ``group`` lacks ranks of the job.
    """
    _check_sizes(name, sizes, group)
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    if len(sizes) > 1 and len(ranks) != dist.get_world_size():
        raise ConfigurationError(
            "the groups of a hierarchy can only be made by all ranks of the job, and this process group has "
            f"{len(ranks)} of {dist.get_world_size()}; use a PeriodicModelAverager for each level, with its own group"
        )
    made: dict[int, dist.ProcessGroup] = {}
    for period, size in sizes.items():
        if size == len(ranks):
            made[period] = group
            continue
        for start in range(0, len(ranks), size):
            subgroup = dist.new_group(ranks[start : start + size])
            if start <= rank < start + size:
                made[period] = subgroup
    return made


def _check_sizes(name: str, sizes: Mapping[int, int], group: dist.ProcessGroup) -> None:
    if not isinstance(sizes, Mapping) or not sizes:
        raise ConfigurationError(
            f"{name} is a mapping of periods to group sizes, as in {{4: 2, 16: 8}}, got {told(sizes)}"
        )
    periods = [check_whole_number(f"a period of {name}", period, least=1) for period in sizes]
    counts = [check_whole_number(f"a size of {name}", size, least=1) for size in sizes.values()]
    for kind, values in (("periods", periods), ("sizes", counts)):
        if any(later <= earlier for earlier, later in itertools.pairwise(values)):
            raise ConfigurationError(f"the {kind} of {name} must ascend, got {values}")
    for smaller, larger in itertools.pairwise(counts):
        if larger % smaller:
            raise ConfigurationError(
                f"each size of {name} must divide the next one, but {smaller} does not divide {larger}"
            )
    if counts[-1] != group.size():
        raise ConfigurationError(
            f"the last size of {name} must be that of the process group, {group.size()}, got {counts[-1]}"
        )
