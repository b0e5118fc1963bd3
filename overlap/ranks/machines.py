"""Which ranks are on one machine, and the process groups that follow: ranks with one host name are on one machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import abandon_group, group_timeout, priority_options
from overlap.errors import ConfigurationError
from overlap.ranks.board import agree

__all__ = ["Levels", "check_is_whole_job", "forget", "levels_of", "note_hosts", "own_subgroup", "ranks_by_machine"]


@dataclass(frozen=True)
class Levels:
    """The two groups of a rank in a job on several machines with as many ranks on each."""

    inside: dist.ProcessGroup
    """The ranks of this machine."""
    between: dist.ProcessGroup
    """The ranks with this one's number on their machine, one on every machine."""

    @classmethod
    def of(cls, machines: list[list[int]], group: dist.ProcessGroup, *, timeout: timedelta) -> Levels:
        """For the ranks of each machine, with the backends of ``group``; all ranks of the job make them together."""
        columns = [list(ranks) for ranks in zip(*machines, strict=True)]
        return cls(*(own_subgroup(members, group, timeout=timeout) for members in (machines, columns)))


_levels: WeakKeyDictionary[dist.ProcessGroup, Levels | None] = WeakKeyDictionary()
_hosts: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()


def note_hosts(group: dist.ProcessGroup, hosts: list[str]) -> None:
    """Keep the host names of the ranks of ``group``, which they have compared when they registered a chain."""
    _hosts[group] = hosts


def forget(group: dist.ProcessGroup, *, has_failed: bool = False) -> None:
    """Destroy what :func:`levels_of` made for ``group``; with ``has_failed`` other ranks that wait on it raise."""
    levels = _levels.pop(group, None)
    for each in () if levels is None else (levels.inside, levels.between):
        if has_failed:
            abandon_group(each)
        dist.destroy_process_group(each)


def levels_of(group: dist.ProcessGroup, device: torch.device) -> Levels | None:
    """The levels of ``group``, made once; ``None`` if it is not the whole job, is on one machine, has one rank on each,
    or machines have different numbers of ranks.

    Communication: host names are compared through the group's store, unless they were at a registration, and on
    several machines two groups are made.
    """
    if group not in _levels:
        _levels[group] = _made_levels(group, device)
    return _levels[group]


def _made_levels(group: dist.ProcessGroup, device: torch.device) -> Levels | None:
    if group.size() == 1 or not dist.is_initialized() or group.size() != dist.get_world_size():
        return None
    machines = _by_host(group, _hosts[group]) if group in _hosts else ranks_by_machine(group)
    if len(machines) == 1 or len(machines) == group.size() or len({len(ranks) for ranks in machines}) > 1:
        return None
    return Levels.of(machines, group, timeout=group_timeout(group, device))


def ranks_by_machine(group: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of ``group`` on each machine, in the order of the group; the same on every rank."""
    return _by_host(group, agree(group, "compare host names", socket.gethostname()))


def _by_host(group: dist.ProcessGroup, hosts: list[str]) -> list[list[int]]:
    ranks = dist.get_process_group_ranks(group)
    return [[rank for rank, other in zip(ranks, hosts, strict=True) if other == host] for host in dict.fromkeys(hosts)]


def check_is_whole_job(group: dist.ProcessGroup, *, remedy: str) -> None:
    """Raises: ConfigurationError: ``group`` lacks ranks of the job, which must make groups together."""
    if group.size() != dist.get_world_size():
        raise ConfigurationError(
            "groups of some ranks can only be made by all ranks of the job, and this process group has "
            f"{group.size()} of {dist.get_world_size()}; {remedy}"
        )


def own_subgroup(members: list[list[int]], group: dist.ProcessGroup, *, timeout: timedelta) -> dist.ProcessGroup:
    """The group of those ``members`` that this rank is one of, with the backends of ``group``; all ranks of the job
    make all of the groups together."""
    backends = str(dist.get_backend_config(group))
    mine: dist.ProcessGroup | None
    mine, _ = dist.new_subgroups_by_enumeration(
        members, timeout=timeout, backend=backends, pg_options=priority_options(backends, timeout)
    )
    assert mine is not None, "every rank is in one of them"
    return mine
