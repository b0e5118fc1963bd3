"""When parameters are averaged, and over which ranks, under PyTorch's names."""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.optim.local_sgd.averaging import average_parameters

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager", "check_hierarchy", "whole"]

Params = Iterable[Tensor] | Iterable[dict[str, Tensor]]

_USELESS = (
    "averaging parameters after every step sends what averaging gradients does, and hides none of it behind "
    "backward: plain DDP is faster"
)


def whole(name: str, value: object, *, least: int) -> int:
    """``value``, if it is a whole number of at least ``least``.

    Raises:
        ConfigurationError: it is not; ``name`` says what it was given for.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is a whole number from {least} on, got {value!r}")
    return value


class ModelAverager(ABC):
    """Averages parameters at some steps of the training loop.

    Args:
        process_group: the ranks to average over; the default group where ``None``.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialized.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("averaging needs torch.distributed.init_process_group first")
        self.process_group: dist.ProcessGroup = process_group if process_group is not None else dist.group.WORLD  # type: ignore[assignment]
        self.step = 0
        """Calls of :meth:`average_parameters` so far."""

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """To be called once a training step, after the optimizer's; averages ``params`` where it is time."""


class PeriodicModelAverager(ModelAverager):
    """Averages in every ``period``-th call, the first of them after ``warmup_steps``.

    Parameters are averaged in place, whether or not they have a gradient; see :func:`average_parameters`.

    Args:
        period: calls from one average to the next.
        warmup_steps: calls before the first average.
        process_group: the ranks to average over; the default group where ``None``.

    Issues, when it is time: one all-reduce for each 8 MB of parameters, on ``process_group``.

    Raises:
        ConfigurationError: ``period`` is below 1, or ``warmup_steps`` below 0.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        self.period = whole("period", period, least=1)
        self.warmup_steps = whole("warmup_steps", warmup_steps, least=0)
        super().__init__(process_group)
        if period == 1:
            warnings.warn(_USELESS, UserWarning, stacklevel=2)

    def average_parameters(self, params: Params) -> None:
        """Average ``params``, parameters or groups of them, if it is time; counts the call."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages often within small groups and seldom within large ones (Lin et al. 2018, arXiv 1808.07217).

    Of the periods that divide the number of calls so far, the longest decides which group averages. Groups are of
    consecutive ranks.

    Args:
        period_group_size_dict: the size of the groups for each period, both ascending; the last size is that of
            ``process_group``.
        warmup_steps: calls before the first average.
        process_group: all ranks that average; the default group where ``None``. Every rank of the job is in it.

    Issues: at construction, those of making the groups; when it is time, one all-reduce for each 8 MB of parameters
    on one group.

    Raises:
        ConfigurationError: periods or sizes are below 1, do not ascend, or sizes do not divide each other; or
            ``process_group`` is not of all ranks of the job.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.warmup_steps = whole("warmup_steps", warmup_steps, least=0)
        super().__init__(process_group)
        sizes = check_hierarchy("period_group_size_dict", period_group_size_dict or {}, self.process_group)
        self.period_process_group_dict = make_groups(sizes, self.process_group)
        """The group of this rank for each period."""
        if max(sizes) == 1:
            warnings.warn(_USELESS, UserWarning, stacklevel=2)

    def average_parameters(self, params: Params) -> None:
        """Average ``params``, parameters or groups of them, if it is time; counts the call."""
        if self.step >= self.warmup_steps:
            group = due_group(self.period_process_group_dict, self.step)
            if group is not None:
                average_parameters(params, group)
        self.step += 1


def check_hierarchy(name: str, sizes: Mapping[int, int], group: dist.ProcessGroup) -> dict[int, int]:
    """The size of the groups for each period, if they fit together.

    Raises:
        ConfigurationError: they do not; ``name`` says what they were given for.
    """
    if not sizes:
        raise ConfigurationError(f"{name} is empty; give the size of the groups for each period, as in {{4: 2, 16: 8}}")
    checked = {
        whole(f"a period of {name}", p, least=1): whole(f"a size of {name}", s, least=1) for p, s in sizes.items()
    }
    periods, counts = list(checked), list(checked.values())
    for what, values in (("periods", periods), ("sizes", counts)):
        if any(later <= earlier for earlier, later in itertools.pairwise(values)):
            raise ConfigurationError(f"the {what} of {name} ascend, got {values}")
    for smaller, larger in itertools.pairwise(counts):
        if larger % smaller:
            raise ConfigurationError(f"each size of {name} divides the next, and {smaller} does not divide {larger}")
    if counts[-1] != group.size():
        raise ConfigurationError(
            f"the last size of {name} is that of the process group, {group.size()}, got {counts[-1]}"
        )
    return checked


def make_groups(sizes: Mapping[int, int], group: dist.ProcessGroup) -> OrderedDict[int, dist.ProcessGroup]:
    """For each period the group of so many consecutive ranks of ``group`` that this rank is in; every rank calls it.

    Raises:
        ConfigurationError: groups are to be made, and ``group`` is not of all ranks of the job, who make them together.
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


def due_group(groups: Mapping[int, dist.ProcessGroup], step: int) -> dist.ProcessGroup | None:
    """The group of the longest period that divides ``step``."""
    return next((groups[period] for period in reversed(list(groups)) if step % period == 0), None)
