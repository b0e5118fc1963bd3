"""`OverlappedOptimizer` as an optimizer: its hooks, its copies, and its life after the registration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_loops import ADAMW
from torch import nn

from harness import assert_parity
from overlap import OverlappedOptimizer


def _stepped() -> OverlappedOptimizer:
    layer = nn.Linear(2, 2)
    plain = ADAMW(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    return OverlappedOptimizer(plain)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_the_state_and_the_defaults_of_the_original(copied: Callable[[Any], Any]) -> None:
    overlapped = _stepped()
    other = copied(overlapped)
    assert_parity(other.state_dict(), overlapped.state_dict(), what="a copy's state")
    assert other.defaults == overlapped.defaults


def test_repr_names_the_wrapped_optimizer() -> None:
    assert "AdamW" in repr(_stepped())
