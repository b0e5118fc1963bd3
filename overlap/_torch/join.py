"""What PyTorch's own code asks of a joinable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Notifying", "divides_by_count_in_vain", "notify", "set_config"]


class Notifying:
    """Stands in for the configuration that PyTorch's ``Join`` gives a joinable.

    DDP, PyTorch's sharded optimizer and other joinables call PyTorch's static ``Join.notify_join_context(self)``, which
    asks this object whether the joinable is the first of its Join, once a call. To be asked is to be notified; the
    answer is no, since the first one alone issues PyTorch's collectives.
    """

    enable = True
    throw_on_early_termination = False

    def __init__(self, on_notify: Callable[[], None]) -> None:
        self._on_notify = on_notify

    @property
    def is_first_joinable(self) -> bool:
        self._on_notify()
        return False


def divides_by_count_in_vain(ddp: DistributedDataParallel) -> bool:
    """Whether PyTorch's ``Join`` is to divide by the ranks that have inputs, which it does in no hook."""
    config = ddp._join_config
    return bool(config.enable) and not isinstance(config, Notifying) and not ddp._divide_by_initial_world_size


def notify(joinable: Joinable) -> Any:
    """Call PyTorch's ``Join.notify_join_context``."""
    return Join.notify_join_context(joinable)


def set_config(joinable: Joinable, config: Any) -> Any:
    """Give ``joinable`` another configuration; returns the one before. Private: it has no public setter."""
    before = joinable._join_config
    joinable._join_config = config
    return before
