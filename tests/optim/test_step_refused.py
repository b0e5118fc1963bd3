"""A loop that is refused on one rank: the others learn of it where they wait for that rank, and all can go on."""

import time

import pytest
import torch.distributed as dist
from step_loops import backward, registered

from harness import assert_equal_ranks, on_ranks, wrap
from harness.models import MLP
from overlap import PeerError, TrainingLoopError

_GROUP_TIMEOUT_S = 40
_REFUSAL = "'lr' of parameter group 0 was changed"


def _refused_on_rank_1(rank: int, form: str, refused_step: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = registered(form, ddp)
    for step in range(refused_step):
        backward(ddp, step, rank)
        optimizer.step()
    backward(ddp, refused_step, rank)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        (group,) = optimizer.param_groups
        group["lr"] = 0.2
        with pytest.raises(TrainingLoopError, match=_REFUSAL):
            optimizer.step()
        group["lr"] = 0.1
        store.wait([f"told {form}"])
        optimizer.step()
    else:
        optimizer.step()
        start_s = time.monotonic()
        with pytest.raises(PeerError, match=f"rank 1: TrainingLoopError: {_REFUSAL}"):
            backward(ddp, refused_step + 1, rank)
        assert time.monotonic() - start_s < _GROUP_TIMEOUT_S / 2
        store.set(f"told {form}", "")
    for step in range(refused_step + 1, refused_step + 4):
        backward(ddp, step, rank)
        optimizer.step()
    assert_equal_ranks(ddp.parameters())


@on_ranks(2, timeout_s=120, group_timeout_s=_GROUP_TIMEOUT_S)
def test_a_step_that_is_refused_on_one_rank_is_told_to_the_others_and_all_go_on(rank: int, world_size: int) -> None:
    for form, refused_step in (("interleaved", 0), ("zero", 2)):  # Before DDP compares buckets, and later.
        _refused_on_rank_1(rank, form, refused_step)
