"""Work in which what fails on one rank is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from overlap._checks import check_group
from overlap.errors import CheckpointError
from overlap.join.group_collectives import of_all_ranks
from overlap.join.meeting import meet

__all__ = ["AllRanks"]

T = TypeVar("T")


class AllRanks:
    """The ranks of ``process_group``, of the default group where ``None``; this process alone if there is none."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = check_group("process_group", process_group)
        if self._group is None and dist.is_available() and dist.is_initialized():
            self._group = dist.group.WORLD
        self.rank, self.size = (0, 1) if self._group is None else (self._group.rank(), self._group.size())

    def meet(self, purpose: str) -> None:
        """Wait until all ranks have come for this ``purpose``.

        Raises:
            CollectiveError: another one has come for another, or did not come.
        """
        if self._group is not None:
            meet(self._group, purpose)

    def each(self, doing: str, work: Callable[[], T]) -> list[T]:
        """What ``work``, called on every rank, has returned on each of them.

        Issues: one gather of that.

        Raises:
            CheckpointError: it raised on another rank, which could not do what ``doing`` says; on that rank the error
                itself.
            CollectiveError: a rank is lost.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = work()
        except Exception as error:
            failure = error
        mine = (None if failure is None else f"{type(failure).__name__}: {failure}", value)
        everyone: list[Any] = [mine]
        if self._group is not None and self.size > 1:
            try:
                everyone = of_all_ranks(mine, self._group)
            except RuntimeError:
                if failure is not None:
                    raise failure  # noqa: B904 (that others have gone is its context)
                raise
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(everyone):
            if text is not None:
                raise CheckpointError(f"rank {rank} could not {doing}: {text}")
        return [value for _, value in everyone]
