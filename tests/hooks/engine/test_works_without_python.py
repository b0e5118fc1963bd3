"""What a chain issues in backward keeps no Python object that Gloo's thread would have to let go of."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, chain

# Versions that keep nothing there in backward, or never let go of it.
pytestmark = pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot take it away")

INLINE, ON_A_WORKER = str(2**20), "0"
STEPS = 8


def _saved() -> Any:
    return torch._C._get_obj_in_tls("context")


def _observed(ddp: DistributedDataParallel) -> list[weakref.ref[Any]]:
    """What PyTorch keeps in each backward, from now on."""
    seen: list[weakref.ref[Any]] = []
    list(ddp.parameters())[-1].register_hook(lambda gradient: seen.append(weakref.ref(_saved())))
    return seen


def _held(ddp: DistributedDataParallel, rank: int, seen: list[weakref.ref[Any]]) -> int:
    """In how many steps that is still held when backward has returned."""
    held = 0
    for step in range(STEPS):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        held += seen[-1]() is not None
    assert len(seen) == STEPS
    return held


def _chain(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    assert _held(ddp, rank, _observed(ddp)) == 0


@pytest.mark.parametrize("limit_bytes", [INLINE, ON_A_WORKER])
def test_works_of_a_chain_hold_nothing(limit_bytes: str) -> None:
    run_ranks(_chain, 2, env={"OVERLAP_SMALL_MODEL_BYTES": limit_bytes})
