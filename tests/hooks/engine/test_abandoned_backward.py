"""What is to run if autograd gives up a backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap._torch import autograd


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("the dog ate it")


def _watched(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    output, said = x * 2, list[str]()
    output.register_hook(lambda gradient: autograd.if_abandoned(lambda: said.append("abandoned")))
    return output.sum(), said


def test_it_runs_before_backward_raises_and_not_otherwise() -> None:
    x = torch.ones(3, requires_grad=True)
    loss, said = _watched(_Raises.apply(x))
    with pytest.raises(ValueError, match="the dog ate it"):
        loss.backward()
    assert said == ["abandoned"]
    loss, said = _watched(x)
    loss.backward()
    assert said == []
