"""What can be given to a Join."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as base

from overlap._torch.join import leads_torch_join
from overlap.errors import ConfigurationError

__all__ = ["JoinHook", "Joinable", "refuse_before_model"]


class JoinHook(base.JoinHook):
    """What a rank that has run out of inputs does instead of its training loop; also a hook of PyTorch's ``Join``.

    >>> class Silent(JoinHook):
    ...     def main_hook(self):
    ...         "What a rank without inputs issues."
    ...     def post_hook(self, is_last_joiner):
    ...         "What every rank does at the end."
    """

    def main_hook(self) -> None:
        """Issue the collectives of one call that notified the Join, the same as ranks with inputs issue."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once on every rank, when all have run out of inputs.

        Args:
            is_last_joiner: whether this rank is one of those with most inputs.
        """


class Joinable(base.Joinable):
    """Issues collectives, once or more per iteration; also a ``Joinable`` of PyTorch's ``Join``.

    Before those collectives it calls ``Join.notify_join_context(self)``. A subclass calls ``Joinable.__init__``.

    >>> class Counter(Joinable):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.counted = 0
    ...     def count(self):
    ...         Join.notify_join_context(self)
    ...         ones = torch.ones(1)
    ...         dist.all_reduce(ones)  # how many ranks take part
    ...         self.counted += int(ones)
    ...     def join_hook(self, **kwargs):
    ...         return CounterHook()
    ...     join_device = torch.device("cpu")
    ...     join_process_group = dist.group.WORLD
    >>> class CounterHook(JoinHook):
    ...     def main_hook(self):  # in place of count(), on a rank without inputs
    ...         dist.all_reduce(torch.zeros(1))
    >>> counter = Counter()
    >>> with Join([counter]) as join:
    ...     for x, y in join.iterate(loader):
    ...         counter.count()
    >>> counter.counted
    4
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> base.JoinHook:
        """Make the hook for one Join.

        Args:
            **kwargs: the keyword arguments of the Join that are not its own, the same for all joinables.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device for the Join's own collectives."""

    @property
    @abstractmethod
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group; the same for all joinables of one Join."""


def refuse_before_model(joinable: base.Joinable, model_joins: Callable[[], bool]) -> None:
    """Called before ``joinable`` notifies its Join; ``model_joins`` says whether its model is in a Join, too.

    Raises:
        ConfigurationError: ``joinable`` comes before the model in PyTorch's ``Join``.
    """
    if leads_torch_join(joinable) and model_joins():
        name = type(joinable).__name__
        raise ConfigurationError(
            f"{name} comes before its model in PyTorch's Join, so a rank that has run out of inputs would issue its "
            f"collectives first, and the others the model's: use Join([ddp, {name}]), or overlap.Join, which takes any "
            "order"
        )
