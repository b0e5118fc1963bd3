"""Which ranks are on one machine, and process groups within machines and between them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from overlap.errors import ConfigurationError
from overlap.join.group_collectives import of_all_ranks

__all__ = ["Machines", "check_is_whole_job", "members_of", "own_subgroup", "ranks_by_machine"]


@dataclass(frozen=True)
class Machines:
    """The two groups that this rank is in, where all machines have as many ranks."""

    inside: dist.ProcessGroup
    """The ranks of this machine."""
    between: dist.ProcessGroup
    """The ranks in the same place on every machine, one per machine."""

    @classmethod
    def connect(cls, members: list[list[int]], *, timeout: timedelta) -> Machines:
        """The groups for machines with these ranks; every rank of the job makes them together."""
        places = [list(place) for place in zip(*members, strict=True)]
        return cls(own_subgroup(members, timeout=timeout), own_subgroup(places, timeout=timeout))


def members_of(group: dist.ProcessGroup, *, size: int | None) -> list[list[int]]:
    """The ranks of ``group`` by machine, ``size`` ranks on each; where ``None``, by host name.

    Issues: with ``size=None`` one gather of host names on ``group``.

    Raises:
        ConfigurationError: ``group`` lacks ranks of the job, or machines have different numbers of ranks; on every rank
            alike.
    """
    check_is_whole_job(group, remedy="train this model on the ranks of the whole job, or use AllReduce()")
    members = ranks_by_machine(group) if size is None else _in_rows(dist.get_process_group_ranks(group), size)
    if len({len(own) for own in members}) > 1:
        raise ConfigurationError(
            f"Hierarchical needs as many ranks on every machine, but the {len(members)} machines have "
            f"{', '.join(str(len(own)) for own in members)}; start as many on each, or use AllReduce()"
        )
    return members


def _in_rows(ranks: Sequence[int], size: int) -> list[list[int]]:
    if len(ranks) % size:
        raise ConfigurationError(
            f"machine_size={size} does not divide the {len(ranks)} ranks of the model's process group: give the number "
            "of ranks on each machine, which must be the same on all"
        )
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def check_is_whole_job(group: dist.ProcessGroup, *, remedy: str) -> None:
    """Raises: ConfigurationError: ``group`` lacks ranks of the job, which must make groups together."""
    if group.size() != dist.get_world_size():
        raise ConfigurationError(
            "the group of a machine's ranks can only be made by all ranks of the job, and this process group has "
            f"{group.size()} of {dist.get_world_size()}; {remedy}"
        )


def ranks_by_machine(group: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of ``group`` on each machine, in the order of the group; the same on every rank.

    Issues: one gather of host names on ``group``.
    """
    hosts = of_all_ranks(socket.gethostname(), group)
    ranks = dist.get_process_group_ranks(group)
    return [[rank for rank, other in zip(ranks, hosts, strict=True) if other == host] for host in dict.fromkeys(hosts)]


def own_subgroup(members: list[list[int]], *, timeout: timedelta) -> dist.ProcessGroup:
    """The group of those ``members`` that this rank is one of; all ranks of the job make all of the groups together."""
    mine: dist.ProcessGroup | None
    mine, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
    assert mine is not None, "every rank is in one of them"
    return mine
