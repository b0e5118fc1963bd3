"""Process groups below ``torch.distributed``'s functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The package exports these at run time, but not to type checkers.
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.distributed import distributed_c10d

__all__ = [
    "Channel",
    "GradBucket",
    "PrefixStore",
    "backend_name",
    "gloo_channel",
    "group_store",
    "group_timeout",
]

# What carries collectives: a registered group, or a backend made for one thread alone. Both have the same methods
# (allreduce, broadcast, send, ...), which `dist.all_reduce` and its siblings call in turn.
Channel = Any


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries collectives of ``device``'s tensors on ``group``, ``"gloo"`` or ``"nccl"``, say."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return "none"
    return name


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store that ``group`` was made with. Private: groups made by ``new_group`` have no public one."""
    if hasattr(group, "get_group_store"):
        try:
            return group.get_group_store()
        except RuntimeError:
            pass  # A group that a custom backend made without a store of its own.
    return distributed_c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of ``group`` may take."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


def gloo_channel(group: dist.ProcessGroup, key: str) -> Channel:
    """A Gloo backend with the ranks of ``group`` and connections of its own; every member calls this, with one ``key``.

    Made directly and not with ``new_group(use_local_synchronization=True)``: that names a group after the number of
    groups that the rank is in, so ranks that are in different numbers of groups wait for each other for ever.
    """
    cpu = torch.device("cpu")
    store = PrefixStore(f"overlap/{key}", group_store(group))
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=group_timeout(group, cpu))
