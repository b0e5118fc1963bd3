"""Which ranks are on one machine, and the process groups that follow: ranks with one host name are on one machine.

[Note: places]

Rank 0 compares the host names and tells each rank its place: the ranks on its machine, and the ranks with its number on
every machine, where there are as many on each. A rank makes the two groups that it is in and knows of no others.
"""

from __future__ import annotations

import itertools
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import abandon_group, group_name, group_timeout, new_group_of
from overlap.errors import ConfigurationError
from overlap.ranks.board import Agreement, PerRank

_BOUND = "leave device_id out of init_process_group: with it, NCCL needs all ranks of the job to make groups of some"


@dataclass(frozen=True)
class Levels:
    """The two groups of a rank whose group is on several machines with as many ranks on each."""

    inside: dist.ProcessGroup
    """The ranks of this machine."""
    between: dist.ProcessGroup
    """The ranks with this one's number on their machine, one on every machine."""


_levels: WeakKeyDictionary[dist.ProcessGroup, Levels | None] = WeakKeyDictionary()
_places: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
# How many subgroups of a group this rank has made: as many as every other rank, so their names agree.
_made: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def places(hosts: list[str]) -> PerRank:
    """Of ranks with these host names, each one's place: the ranks on its machine (``None`` for all), those with its
    number on every machine (``None`` without levels), and on rank 0 why they are missed."""
    machines: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        machines.setdefault(host, []).append(rank)
    sizes, columns, missed = sorted(map(len, machines.values())), [], ""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", len(hosts)))
    if len(machines) == 1 and local < len(hosts):
        missed = f"torchrun has started {local} ranks here, and {len(hosts)} are called {hosts[0]!r}: give each "
        missed += f"machine a name of its own; {_more(local, len(hosts))}"
    elif sizes[0] < sizes[-1]:
        missed = f"machines have {sizes[0]} to {sizes[-1]} ranks: start as many on each; "
        missed += _more(sizes[-1], len(hosts))
    elif 1 < sizes[0] < len(hosts):
        columns = list(map(list, zip(*machines.values(), strict=True)))
    found = PerRank([None] * len(hosts))
    for ranks in machines.values():
        machine = ranks if len(machines) > 1 else None
        for number, rank in enumerate(ranks):
            found[rank] = [machine, columns[number] if columns else None, "" if rank else missed]
    return found


def _more(local: int, ranks: int) -> str:
    """With levels, the ranks of a machine together send to others as much as one rank that sends to all by itself."""
    between = (ranks - local) / ranks
    factor = (local * between + (ranks - 1) / ranks) / (2 * between)
    return f"without sums within a machine first, it sends about {factor:.1f} times the bytes to the others"


def note_place(group: dist.ProcessGroup, place: Any) -> None:
    """Keep this rank's part of :func:`places`, which the ranks of ``group`` have found when they registered a chain."""
    _places[group] = place


def _place_of(group: dist.ProcessGroup) -> Any:
    if group not in _places:
        with Agreement(group, "compare host names") as agreement:
            _places[group] = agreement.agree(socket.gethostname(), places)
    return _places[group]


def forget(group: dist.ProcessGroup, *, has_failed: bool = False) -> None:
    """Destroy the groups of :func:`levels_of` for ``group``; with ``has_failed`` other ranks that wait on it raise."""
    levels = _levels.pop(group, None)
    for each in () if levels is None else (levels.inside, levels.between):
        if has_failed:
            abandon_group(each)
        dist.destroy_process_group(each)


def levels_of(group: dist.ProcessGroup, device: torch.device) -> Levels | None:
    """The levels of ``group``, made once; ``None`` if it is on one machine or has one rank on each, and, with a
    warning, if machines have different numbers of ranks or ranks alone cannot make groups.

    Communication: host names are compared through the group's store, unless they were at a registration, and on
    several machines each rank makes two groups.
    """
    if group not in _levels:
        _levels[group] = _made_levels(group, device)
    return _levels[group]


def _made_levels(group: dist.ProcessGroup, device: torch.device) -> Levels | None:
    if group.size() == 1 or not dist.is_initialized():
        return None
    machine, column, missed = _place_of(group)
    if column is not None and _lacks_ranks(group):
        column, missed = None, "" if group.rank() else f"{_BOUND}; {_more(len(machine), group.size())}"
    if missed:
        warnings.warn(missed, UserWarning, stacklevel=2)
    if column is None:
        return None
    timeout = group_timeout(group, device)
    return Levels(*(own_subgroup(ranks, group, timeout=timeout) for ranks in (machine, column)))


def group_of_machine(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of ``group`` on this machine; raises as :func:`own_subgroup`."""
    machine, *_ = _place_of(group)
    return group if machine is None else own_subgroup(machine, group, timeout=group_timeout(group, torch.device("cpu")))


def _lacks_ranks(group: dist.ProcessGroup) -> bool:
    """Whether ranks outside of ``group`` must help to divide it. Where the job is bound to devices, NCCL splits the
    job's communicator, in which every rank takes part."""
    return group.size() < dist.get_world_size() and getattr(dist.group.WORLD, "bound_device_id", None) is not None


def own_subgroup(
    ranks: Sequence[int], group: dist.ProcessGroup, *, timeout: timedelta, has_priority: bool = True
) -> dist.ProcessGroup:
    """A group of these ``ranks`` of ``group``, this one among them, with its backends. Every rank of ``group`` calls
    this at the same time for its own part, and makes no other.

    Raises:
        ConfigurationError: it lacks ranks of the job that must take part.
    """
    if _lacks_ranks(group):
        raise ConfigurationError(f"{_BOUND}, and this process group has {group.size()} of {dist.get_world_size()}")
    whole, number = dist.get_process_group_ranks(group), next(_made.setdefault(group, itertools.count()))
    name = f"overlap/{group_name(group)}/{number}/{ranks[0]}"
    members, backends = [whole[rank] for rank in ranks], str(dist.get_backend_config(group))
    return new_group_of(members, name, backends=backends, timeout=timeout, has_priority=has_priority)
