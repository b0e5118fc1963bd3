"""What an :class:`ElasticLocalSGD` may be given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_number, check_whole_number, described
from overlap._torch.c10d import Store
from overlap._torch.compiled import uncompiled
from overlap.errors import ConfigurationError
from overlap.join.views import Limits

__all__ = ["check_store", "checked_limits", "checked_model", "checked_period", "layout_of"]


def checked_limits(
    world_size: int,
    min_size: int,
    timeout: float | timedelta,
    join_timeout: float | timedelta,
    heartbeat_timeout: float | timedelta,
) -> Limits:
    """Raises: ConfigurationError: one of them is out of range."""
    limits = Limits(
        world_size=check_whole_number("world_size", world_size, least=1),
        min_size=check_whole_number("min_size", min_size, least=1),
        timeout_s=_seconds("timeout", timeout),
        join_timeout_s=_seconds("join_timeout", join_timeout),
        heartbeat_timeout_s=_seconds("heartbeat_timeout", heartbeat_timeout),
    )
    if min_size > world_size:
        raise ConfigurationError(f"min_size is {min_size}, and the group begins with world_size={world_size}")
    return limits


def check_store(store: object) -> None:
    """Raises: ConfigurationError: it is not a store."""
    if not isinstance(store, Store):
        raise ConfigurationError(
            f"store is a store such as torch.distributed.TCPStore(host, port, is_master=False), got {described(store)}"
        )


def checked_model(model: nn.Module) -> nn.Module:
    """Raises: ConfigurationError: it is not a module, or reduces gradients by itself."""
    plain = uncompiled(model)
    if not isinstance(plain, nn.Module):
        raise ConfigurationError(f"model is the module that is trained, got {described(plain)}")
    if any(isinstance(part, DistributedDataParallel) for part in plain.modules()):
        raise ConfigurationError(
            "each process of an ElasticLocalSGD trains alone between averages, without a process group that a lost one "
            "would break, and this model is in DistributedDataParallel: give the module that it wraps, ddp.module"
        )
    return plain


def checked_period(period: Any) -> int | Callable[[int], int]:
    """Raises: ConfigurationError: it is neither a number nor a function."""
    if isinstance(period, Mapping):
        raise ConfigurationError(
            f"period is {period!r}, a hierarchy, whose groups would have to stay as they are: give one number of "
            "steps, or use LocalSGD"
        )
    return period if callable(period) else check_whole_number("period", period, least=1)


def _seconds(name: str, value: float | timedelta) -> float:
    return check_number(name, value.total_seconds() if isinstance(value, timedelta) else value, above=0)


def layout_of(module: nn.Module) -> str:
    """The model in a few words that are the same for the same names, shapes and dtypes."""
    layout = [
        (name, tuple(value.shape), str(value.dtype))
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    ]
    return f"{len(layout)} tensors, layout {hashlib.sha256(repr(layout).encode()).hexdigest()[:12]}"
