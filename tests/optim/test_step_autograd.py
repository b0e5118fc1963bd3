"""An update in the middle of backward, as autograd sees it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from harness import run_ranks, wrap
from overlap import AllReduce, OverlappedOptimizer, Step, chain


class _NeedsALateWeight(nn.Module):
    """`late` gets its gradient first, but the backward of an earlier product still needs its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.early(x) @ self.late.weight.detach()
        hidden.register_hook(lambda grad: time.sleep(0.2))  # Time enough for the update of `late`.
        return self.late(self.middle(hidden))


def _updated_too_early(rank: int, world_size: int, implementation: dict[str, bool]) -> None:
    ddp = wrap(_NeedsALateWeight())
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **implementation))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    ddp(torch.ones(4, 16)).sum().backward()  # One bucket, updated when all is done.
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ddp(torch.ones(4, 16)).sum().backward()


@pytest.mark.parametrize("implementation", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_updated_weight_that_backward_still_needs_is_autograds_error(implementation: dict[str, bool]) -> None:
    run_ranks(_updated_too_early, 2, implementation)
