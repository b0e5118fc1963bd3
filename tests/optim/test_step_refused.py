"""A loop that is refused on one rank: the others learn of it where they wait for that rank, and all can go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from step_loops import backward, registered

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import PeerError, TrainingLoopError

_GROUP_TIMEOUT_S = 40
_REFUSAL = "'lr' of parameter group 0 was changed"


def _refused(optimizer: Any) -> Any:
    """A step that is refused: returns what pytest.raises gives."""
    (group,) = optimizer.param_groups
    group["lr"] = 0.2
    with pytest.raises(TrainingLoopError, match=_REFUSAL) as kept:  # So nothing of the model goes away.
        optimizer.step()
    group["lr"] = 0.1
    return kept


def _refused_on_rank_1(rank: int, world_size: int, form: str, refused_step: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = registered(form, ddp)
    for step in range(refused_step):
        backward(ddp, step, rank)
        optimizer.step()
    backward(ddp, refused_step, rank)
    kept = None
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        kept = _refused(optimizer)
        store.wait(["told"])
        optimizer.step()
    else:
        optimizer.step()
        start_s = time.monotonic()
        with pytest.raises(PeerError, match=f"rank 1: TrainingLoopError: {_REFUSAL}"):
            backward(ddp, refused_step + 1, rank)
        assert time.monotonic() - start_s < _GROUP_TIMEOUT_S / 2
        store.set("told", "")
    for step in range(refused_step + 1, refused_step + 4):
        backward(ddp, step, rank)
        optimizer.step()
    for parameter in ddp.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(parameter, first)
    assert (kept is None) == (rank == 0)


# Before DDP compares buckets, and later.
@pytest.mark.parametrize(("form", "refused_step"), [("interleaved", 0), ("zero", 2)])
def test_a_step_that_is_refused_on_one_rank_is_told_to_the_others_and_all_go_on(form: str, refused_step: int) -> None:
    run_ranks(_refused_on_rank_1, 2, form, refused_step, timeout_s=120, group_timeout_s=_GROUP_TIMEOUT_S)


def _refused_while_the_other_waits_for_buffers(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    ddp = wrap(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)))
    optimizer = registered("interleaved", ddp)
    for _ in range(3):
        ddp(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    ddp(torch.randn(4, 16)).square().mean().backward()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # DDP sends this rank's buffers.
        _refused(optimizer)
        store.wait(["told"])
    else:
        optimizer.step()
        with pytest.raises(RuntimeError) as raised:
            ddp(torch.randn(4, 16))
        assert any("failed first: rank 0: TrainingLoopError: 'lr' of" in note for note in raised.value.__notes__)
        store.set("told", "")


def test_an_error_of_ddps_own_broadcast_says_which_rank_was_refused() -> None:
    run_ranks(_refused_while_the_other_waits_for_buffers, 2, group_timeout_s=4)
