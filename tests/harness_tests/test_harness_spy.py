"""`bucket_calls` proves that a stage ran, and changes it only while it is open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness import bucket_calls


class _Stage:
    async def __call__(self, bucket: Any) -> None: ...


class _Bucket:
    index = 4


def _call() -> None:
    coroutine = _Stage()(_Bucket())
    with pytest.raises(StopIteration):
        coroutine.send(None)


@pytest.fixture
def calls() -> Iterator[list[int]]:
    with bucket_calls(_Stage) as calls:
        yield calls


def test_the_bucket_of_every_call_is_listed(calls: list[int]) -> None:
    _call()
    assert calls == [4]


def test_the_stage_is_as_before_when_the_spy_is_closed() -> None:
    original = _Stage.__call__
    with bucket_calls(_Stage):
        pass
    assert _Stage.__call__ is original
