"""When ranks average, and which of them with each other."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch.distributed as dist

from overlap._checks import check_whole_number, told
from overlap.errors import ConfigurationError
from overlap.optim.local_sgd.compressed import Ranks

__all__ = ["Period", "Schedule", "check_hierarchy", "due_group", "make_groups", "make_ranks"]

Period = int | Mapping[int, int] | Callable[[int], int]
"""Steps from one average to the next; or the group size for each period; or a function that takes the step at which a
round begins, counted from 0, and returns the round's length."""


class Schedule:
    """Counts steps, and says when a round ends and which ranks average then.

    There is one level of ranks, or with a hierarchy one per period: level 0 is the smallest group.

    Args:
        period: how long rounds are.
        start_step: steps before the first.
        group: all ranks.
        has_wire: averages of all ranks are exact within the next smaller groups, and go through a wire between them.

    Issues, with a hierarchy: what making its groups takes, at construction.

    Raises:
        ConfigurationError: ``period`` or ``start_step`` is out of range.
    """

    def __init__(self, period: Period, start_step: int, group: dist.ProcessGroup, *, has_wire: bool = False) -> None:
        self.start_step = check_whole_number("start_step", start_step, least=0)
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._period = period
        if isinstance(period, Mapping):
            self._groups = make_groups(check_hierarchy("period", period, group), group)
        elif not callable(period):
            check_whole_number("period", period, least=1)
        self._whole_group = group
        self._whole = make_ranks(list(self._groups.values()), group) if has_wire else Ranks(group)
        self.step = 0
        """Training steps so far: the only counter of steps."""
        self.round_end: int | None = None
        """The step after which ranks average next, once local SGD has started."""

    @property
    def levels(self) -> int:
        """How many sizes of groups there are."""
        return max(1, len(self._groups))

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
            group = due_group(self._groups, self.step - self.start_step)
            return None if group is None else list(self._groups.values()).index(group)
        if self.step != self.round_end:
            return None
        self.round_end = None
        return 0

    def restart(self) -> None:
        """Begin again from step 0."""
        self.step, self.round_end = 0, None

    def group_of(self, level: int) -> dist.ProcessGroup:
        """The ranks that average at ``level`` with this one."""
        return list(self._groups.values())[level] if self._groups else self._whole_group

    def ranks_of(self, level: int) -> Ranks:
        """Those of :meth:`group_of`, and how a wire divides them."""
        return self._whole if level == self.levels - 1 else Ranks(self.group_of(level))

    @property
    def summary(self) -> str:
        """The same words on every rank that has the same schedule."""
        if isinstance(self._period, Mapping):
            period = str(dict(self._period))
        elif callable(self._period):
            period = getattr(self._period, "__qualname__", type(self._period).__name__)
        else:
            period = told(self._period)
        return f"period {period} from step {told(self.start_step)}"


def check_hierarchy(name: str, sizes: Mapping[int, int], group: dist.ProcessGroup) -> dict[int, int]:
    """The group size for each period, if they fit together and the last one is that of ``group``.

    Raises:
        ConfigurationError: they do not; the message calls them ``name``.
    """
    if not isinstance(sizes, Mapping):
        raise ConfigurationError(
            f"{name} is a mapping of periods to group sizes, as in {{4: 2, 16: 8}}, got {told(sizes)}"
        )
    if not sizes:
        raise ConfigurationError(f"{name} is empty; give the group size for each period, as in {{4: 2, 16: 8}}")
    periods = [check_whole_number(f"a period of {name}", period, least=1) for period in sizes]
    counts = [check_whole_number(f"a size of {name}", size, least=1) for size in sizes.values()]
    for what, values in (("periods", periods), ("sizes", counts)):
        if any(later <= earlier for earlier, later in itertools.pairwise(values)):
            raise ConfigurationError(f"the {what} of {name} must ascend, got {values}")
    for smaller, larger in itertools.pairwise(counts):
        if larger % smaller:
            raise ConfigurationError(
                f"each size of {name} must divide the next one, but {smaller} does not divide {larger}"
            )
    if counts[-1] != group.size():
        raise ConfigurationError(
            f"the last size of {name} must be that of the process group, {group.size()}, got {counts[-1]}"
        )
    return dict(zip(periods, counts, strict=True))


def make_groups(sizes: Mapping[int, int], group: dist.ProcessGroup) -> OrderedDict[int, dist.ProcessGroup]:
    """For each period the group of so many consecutive ranks of ``group`` that this rank is in; every rank calls it.

    Raises:
        ConfigurationError: a group must be made, which all ranks of the job do together, and ``group`` lacks some.
    """
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    if any(size != len(ranks) for size in sizes.values()) and len(ranks) != dist.get_world_size():
        raise ConfigurationError(
            "the groups of a hierarchy can only be made by all ranks of the job, and this process group has "
            f"{len(ranks)} of {dist.get_world_size()}; use a PeriodicModelAverager for each level, with its own group"
        )
    made: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
    for period, size in sizes.items():
        if size == len(ranks):
            made[period] = group
            continue
        for start in range(0, len(ranks), size):
            subgroup = dist.new_group(ranks[start : start + size])
            if start <= rank < start + size:
                made[period] = subgroup
    return made


def make_ranks(levels: list[dist.ProcessGroup], group: dist.ProcessGroup) -> Ranks:
    """All ranks of ``group``, divided into the largest groups of a hierarchy that are smaller; every rank calls it.

    Issues, where there are such groups: the collectives of making groups.
    """
    within = next((smaller for smaller in reversed(levels) if 1 < smaller.size() < group.size()), None)
    if within is None:
        return Ranks(group)
    ranks, size = dist.get_process_group_ranks(group), within.size()
    groups = [dist.new_group(ranks[place::size]) for place in range(size)]
    return Ranks(group, within, groups[within.rank()])


def due_group(groups: Mapping[int, dist.ProcessGroup], step: int) -> dist.ProcessGroup | None:
    """The group of the longest period that divides ``step``."""
    return next((groups[period] for period in reversed(list(groups)) if step % period == 0), None)
