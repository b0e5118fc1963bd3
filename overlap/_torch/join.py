"""The questions that PyTorch's ``Join`` and DDP ask of a joinable, and their answers. Private names, which have no
public way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel


class _NotifyingConfig:
    """Takes the place of the configuration that PyTorch's ``Join`` gives a joinable.

    DDP, PyTorch's sharded optimizer and other joinables call PyTorch's static ``Join.notify_join_context(self)``, which
    asks this object once per call whether the joinable is the first of its Join. Being asked is the notification; the
    answer is always no, since only the first joinable issues PyTorch's collectives.
    """

    enable = True
    throw_on_early_termination = False

    def __init__(self, on_notify: Callable[[], None]) -> None:
        self._on_notify = on_notify

    @property
    def is_first_joinable(self) -> bool:
        self._on_notify()
        return False


def on_notify(joinable: Joinable, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` whenever ``joinable`` notifies its Join; returns a function that undoes this."""
    before = joinable._join_config
    config: Any = _NotifyingConfig(callback)
    joinable._join_config = config

    def undo() -> None:
        joinable._join_config = before

    return undo


def is_joining(joinable: Joinable) -> bool:
    """Whether ``joinable`` is inside of a ``Join``, overlap's or PyTorch's."""
    return bool(joinable._join_config.enable)


def leads_torch_join(joinable: Joinable) -> bool:
    """Whether ``joinable`` is the first in the list of PyTorch's ``Join``, whose collectives it then issues."""
    config = joinable._join_config
    return bool(config.enable) and not isinstance(config, _NotifyingConfig) and bool(config.is_first_joinable)


def torch_join_divides_by_count(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` is in PyTorch's ``Join`` with ``divide_by_initial_world_size=False``, which hooks do not see."""
    config = ddp._join_config
    return bool(config.enable) and not isinstance(config, _NotifyingConfig) and not ddp._divide_by_initial_world_size


def used_in_shadow(ddp: DistributedDataParallel) -> set[int] | None:
    """The parameters, by ``id``, that a rank used in the backward that PyTorch's ``Join`` has just shadowed on this
    rank; ``None`` where DDP does not look."""
    if not ddp.find_unused_parameters or ddp.static_graph:
        return None
    trained, _ = ddp._build_params_for_reducer()
    counts = ddp.reducer._get_local_used_map().tolist()
    return {id(parameter) for parameter, count in zip(trained, counts, strict=True) if count}
