"""State dicts of an overlapped optimizer are the wrapped one's, and load where those load."""

from __future__ import annotations

import copy

from step_loops import ADAMW, BOTH_MODES, overlapped_ddp, plain_ddp, renumbered

from harness import assert_parity, overlapped_step, run_ranks, train
from harness.models import MLP


def _resumed_twice(rank: int, world_size: int, deferred: bool) -> None:
    batches = MLP.batches(rank, steps=9)
    ddp, optimizer = plain_ddp(MLP, ADAMW)
    reference = train(ddp, optimizer, batches)

    ddp, optimizer = plain_ddp(MLP, ADAMW)
    records = train(ddp, optimizer, batches[:3])
    model_state, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    ddp, overlapped, _ = overlapped_ddp(MLP, ADAMW, deferred=deferred)
    ddp.module.load_state_dict(model_state)
    overlapped.load_state_dict(state)
    records += renumbered(train(ddp, overlapped, batches[3:6], step_fn=overlapped_step), 3)
    model_state, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(overlapped.state_dict())
    ddp, optimizer = plain_ddp(MLP, ADAMW)
    ddp.module.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    records += renumbered(train(ddp, optimizer, batches[6:]), 6)
    # A new scheduler notes the rate that it starts from; that is not part of the update.
    for record in (*records, *reference):
        for group in record.optimizer["param_groups"]:
            group.pop("initial_lr", None)
    assert_parity(records, reference, what="plain, overlapped and plain in turn")


@BOTH_MODES
def test_training_resumes_exactly_from_plain_to_overlapped_and_back(deferred: bool) -> None:
    run_ranks(_resumed_twice, 2, deferred)


def _through_distributed_checkpoint(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ddp, overlapped, _ = overlapped_ddp(MLP, ADAMW)
    train(ddp, overlapped, MLP.batches(rank, steps=3), step_fn=overlapped_step)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(ddp, overlapped))
    ddp, fresh, _ = overlapped_ddp(MLP, ADAMW)
    set_state_dict(ddp, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_parity(fresh.state_dict()["state"], overlapped.state_dict()["state"], what="state by way of DCP")
    train(ddp, fresh, MLP.batches(rank, steps=2), step_fn=overlapped_step, min_buckets=1)


def test_torchs_distributed_checkpoint_loads_into_a_fresh_optimizer() -> None:
    run_ranks(_through_distributed_checkpoint, 2)
