"""The mean of the gradients by each exact reducer, against plain DDP; ``test_torch_names.py`` has casts."""

import torch
import torch.distributed as dist
from torch import nn

import overlap
from harness import UNKNOWN_BACKEND, assert_parity, on_ranks
from harness.models import DTYPES, MLP, TRANSFORMER
from overlap import AllReduce, Cast, NoReduction, chain, register

from .runs import plain, run, to_ddp


@on_ranks(3)
def test_all_reduce_equals_plain_ddp_bit_for_bit(rank: int, world_size: int) -> None:
    for case in (MLP, DTYPES, TRANSFORMER):
        reference = run(rank, plain, case)
        assert_parity(run(rank, chain(AllReduce()).register, case), reference, what=f"AllReduce, {case}")


@on_ranks(2)
def test_no_reduction_leaves_each_ranks_own_gradient(rank: int, world_size: int) -> None:
    reference = MLP.model()
    nn.functional.mse_loss(reference(*MLP.batch(0, rank).inputs), MLP.batch(0, rank).target).backward()
    own = {name: p.grad for name, p in reference.named_parameters()}
    for attach in (chain(NoReduction()).register, lambda ddp: to_ddp(ddp, overlap.noop_hook)):
        (record,) = run(rank, attach, steps=1)
        assert_parity(record.gradients, own, what="each rank's own gradient")


@on_ranks(4)
def test_a_reducer_uses_the_group_that_is_named(rank: int, world_size: int) -> None:
    """Models on pairs of ranks, where ranks are in different numbers of groups."""
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 1, 2))]
    mine, member = groups[rank // 2], rank % 2
    reference = run(member, plain, process_group=mine)
    ways = {
        "the model's group": run(member, chain(AllReduce()).register, process_group=mine),
        "the hook's state": run(member, lambda ddp: to_ddp(ddp, overlap.allreduce_hook, mine), process_group=mine),
        # The model's own group is the whole world here.
        "the hook's state alone": run(member, lambda ddp: register(ddp, overlap.allreduce_hook, mine)),
    }
    for way, records in ways.items():
        assert_parity(records, reference, what=f"a subgroup that is named by {way}")


@on_ranks(2, backend=UNKNOWN_BACKEND)
def test_without_gloo_stages_run_on_autograds_thread(rank: int, world_size: int) -> None:
    reference = run(rank, plain)
    for stage in (AllReduce(), Cast(torch.float32)):
        assert_parity(run(rank, chain(stage).register), reference, what=f"{stage!r} on autograd's thread")
