"""At the end of a Join rank 0, whose process may host the store, goes on last."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from overlap._torch import stores
from overlap.join.event_log import EventLog


class _Group:
    """One rank's view of a group of two."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError("no backend")


def test_rank_0_goes_on_when_all_have_read_what_the_ranks_say_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(stores, "group_store", lambda group: store)
    groups: list[Any] = [_Group(0), _Group(1)]
    logs = [EventLog(group, "0") for group in groups]
    has_gone_on = threading.Event()

    def first() -> Any:
        told = logs[0].exchange_at_end("of rank 0")
        has_gone_on.set()
        return told

    def slow() -> tuple[Any, bool]:
        read = logs[1].board.read

        def read_late(keys: Any, *, late: Any) -> list[Any]:
            goes_first.append(has_gone_on.wait(1.0))
            return read(keys, late=late)

        goes_first: list[bool] = []
        monkeypatch.setattr(logs[1].board, "read", read_late)
        return logs[1].exchange_at_end("of rank 1"), any(goes_first)

    with ThreadPoolExecutor(2) as pool:
        on_rank_0, on_rank_1 = pool.submit(first), pool.submit(slow)
    assert on_rank_0.result() == ["of rank 0", "of rank 1"]
    assert on_rank_1.result() == (["of rank 0", "of rank 1"], False)
