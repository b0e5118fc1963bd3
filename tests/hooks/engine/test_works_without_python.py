"""What a chain issues in backward keeps no Python object that Gloo's thread would have to let go of."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import on_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, chain
from overlap.hooks.engine import executors

# Versions that keep nothing there in backward, or never let go of it.
pytestmark = pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot take it away")

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


@on_ranks(2)
def test_works_of_a_chain_hold_nothing(rank: int, world_size: int) -> None:
    for limit_bytes in (2**20, 0):  # Inline, and on a worker.
        with mock.patch.object(executors, "SMALL_BYTES", limit_bytes):
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            chain(AllReduce()).register(ddp)
            assert _held(ddp, rank, _observed(ddp)) == 0
