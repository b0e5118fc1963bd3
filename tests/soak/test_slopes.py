"""Nothing grows in a hundred steps, and a deliberate leak is found."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from soak.slopes import slopes_of


def _grown(form: str, leak: Callable[[int, dist.Store], object] | None = None) -> list[str]:
    _, slopes = slopes_of(form, steps=100, samples=10, leak=leak)
    return [name for name, slope in slopes.items() if slope.grows]


@pytest.mark.parametrize("form", ["ZeroStep, gathered in forward", "LocalSGD, overlapped", "Join"])
def test_nothing_grows(form: str) -> None:
    assert _grown(form) == []


_kept: list[Any] = []


def _leak(step: int, store: dist.Store) -> None:
    _kept.append(torch.ones(2**16))
    if step % 20 == 0:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def test_what_leaks_on_purpose_is_found() -> None:
    assert {"memory, KiB", "threads"} <= set(_grown("plain DDP", _leak))
