"""How ranks exchange values in `overlap.auto`, and learn of a failure instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness import run_ranks
from overlap.plan.meeting import Meeting


def _met(rank: int, world_size: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    meeting = Meeting(group, torch.device("cpu"))
    return [meeting.exchange([rank, 0.1]), meeting.from_first("chosen" if rank == 0 else None), meeting.exchange(rank)]


def test_a_meeting_exchanges_values_without_a_collective() -> None:
    for found in run_ranks(_met, 3):
        assert found == [[[0, 0.1], [1, 0.1], [2, 0.1]], "chosen", [0, 1, 2]]


class _LooksOnceTooEarly:
    """A store of which the first question is asked before the others have come."""

    def __init__(self, store: Any) -> None:
        self._store, self._is_early = store, True

    def check(self, keys: list[str]) -> bool:
        if self._is_early:
            self._is_early = False
            return False
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _met_before_a_failure(rank: int, world_size: int) -> Any:
    """Rank 0 fails as soon as it has the values; rank 1 has just looked for them, and then sees the failure."""
    group = dist.group.WORLD
    assert group is not None
    meeting = Meeting(group, torch.device("cpu"))
    if rank == 1:
        meeting._store = _LooksOnceTooEarly(meeting._store)  # type: ignore[assignment]
        meeting._failure_of_others = partial(meeting._failure_of_others, patience_s=20.0)  # type: ignore[method-assign]
        return meeting.exchange("yours")
    try:
        with meeting.watched():
            raise ValueError(meeting.exchange("mine"))
    except ValueError as error:
        return error.args[0]


def test_a_rank_that_fails_after_an_exchange_does_not_hide_its_values() -> None:
    assert run_ranks(_met_before_a_failure, 2) == [["mine", "yours"]] * 2
