"""An error of the model's own in backward, on one rank: every rank raises at once, and the model can be used again."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from step_loops import registered
from torch import Tensor, nn

from harness import run_ranks, wrap
from overlap import PeerError

FORMS = ("interleaved", "zero deferred")


class _Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise ValueError("the dog ate it")


class _Net(nn.Module):
    """Fails in backward before the gradients of the layer ``place - 1``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.place: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place == self.place:
                x = _Raises.apply(x)  # type: ignore[no-untyped-call]
            x = layer(x).tanh()
        return x


def _one_rank_fails(rank: int, world_size: int) -> None:
    for form, place in zip(FORMS, (2, 1), strict=True):
        torch.manual_seed(0)
        ddp = wrap(_Net(), bucket_cap_mb=1100 / 2**20)
        optimizer = registered(form, ddp)
        start = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
        for step in range(7):
            is_failing = step in (3, 4)
            ddp.module.place = place if is_failing and rank == 1 else None
            if step == 5 and form == "interleaved":  # Its update may have been made in part.
                ddp.module.load_state_dict(start)
            loss = ddp(torch.full((4, 16), rank + 1.0)).square().sum()
            start_s = time.monotonic()
            try:
                loss.backward()
                error = None
            except (ValueError, PeerError) as raised:
                error = raised
            if is_failing:
                _check_failure(rank, error, time.monotonic() - start_s, optimizer)
                warned = any("load a checkpoint" in note for note in getattr(error, "__notes__", ()))
                assert not warned or form == "interleaved"
                continue
            assert error is None, f"{form}, step {step}: {error!r}"
            optimizer.step()
        gathered = [torch.empty_like(ddp.module.layers[0].weight) for _ in range(world_size)]
        torch.distributed.all_gather(gathered, ddp.module.layers[0].weight.detach())
        assert torch.equal(gathered[0], gathered[1])


def _check_failure(rank: int, error: Exception | None, seconds: float, optimizer: Any) -> None:
    assert seconds < 8
    if rank == 1:
        assert isinstance(error, ValueError)
        assert "the dog ate it" in str(error)
    else:
        assert isinstance(error, PeerError), repr(error)
        assert "rank 1: AbandonedBackwardError: backward ended with an error outside of the stages" in str(error)
    with pytest.raises(RuntimeError, match="the last backward or update raised"):
        optimizer.step()


def test_an_error_in_one_ranks_backward_is_an_error_on_every_rank_at_once() -> None:
    run_ranks(_one_rank_fails, 2)
