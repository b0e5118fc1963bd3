"""The mean of the gradients by each exact reducer, and by a cast, against plain DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlap
from harness import UNKNOWN_BACKEND, Record, assert_parity, run_ranks
from harness.models import DTYPES, MLP, TRANSFORMER
from overlap import AllGather, AllReduce, Cast, NoReduction, chain, register

from .runs import plain, run, to_ddp, trained

Runs = list[list[Record]]


@pytest.fixture(
    scope="module",
    params=[(world_size, case) for world_size in (2, 3, 4) for case in (MLP, DTYPES, TRANSFORMER)],
    ids=lambda param: f"{param[0]} ranks, {param[1]}",
)
def means(request: pytest.FixtureRequest) -> tuple[int, Runs, Runs, Runs]:
    """The world's size, and runs with DDP's own reduction, `AllReduce` and `AllGather`."""
    world_size, case = request.param
    runs = trained(plain, chain(AllReduce()).register, chain(AllGather()).register, case=case, world_size=world_size)
    return world_size, *runs


def test_all_reduce_equals_plain_ddp_bit_for_bit(means: tuple[int, Runs, Runs, Runs]) -> None:
    _, reference, all_reduced, _ = means
    assert_parity(all_reduced, reference, what="AllReduce")


def test_all_gather_equals_plain_ddp_but_for_the_order_of_summation(means: tuple[int, Runs, Runs, Runs]) -> None:
    world_size, reference, _, gathered = means
    if world_size == 2:
        assert_parity(gathered, reference, what="AllGather")
        return
    assert_parity(
        [[record.gradients for record in records] for records in gathered],
        [[record.gradients for record in records] for records in reference],
        what="AllGather",
        exact=False,
        rtol=0.02,  # One part in 256 for a bfloat16 gradient, and what five steps make of it.
        atol=1e-3,
        reason="sums over ranks are taken in another order than the all-reduce's",
    )


def _no_reduction(rank: int, world_size: int) -> None:
    reference = MLP.model()
    nn.functional.mse_loss(reference(*MLP.batch(0, rank).inputs), MLP.batch(0, rank).target).backward()
    own = {name: p.grad for name, p in reference.named_parameters()}
    for attach in (chain(NoReduction()).register, lambda ddp: to_ddp(ddp, overlap.noop_hook)):
        (record,) = run(rank, attach, steps=1)
        assert_parity(record.gradients, own, what="each rank's own gradient")


def test_no_reduction_leaves_each_rank_its_own_gradient() -> None:
    run_ranks(_no_reduction, 2)


def test_a_cast_to_bfloat16_rounds_and_stays_within_its_precision() -> None:
    for ours, theirs in zip(*trained(chain(Cast(torch.bfloat16)).register, plain), strict=True):
        assert_parity(
            [record.parameters for record in ours],
            [record.parameters for record in theirs],
            what="bf16 gradients",
            exact=False,
            rtol=0.0,
            atol=0.02,
            reason="bfloat16 keeps 8 bits of each gradient",
        )
        assert not torch.equal(ours[-1].parameters["0.weight"], theirs[-1].parameters["0.weight"]), "it did round"


def test_a_cast_to_float16_takes_gradients_of_every_dtype() -> None:
    (by_rank,) = trained(chain(Cast(torch.float16)).register, case=DTYPES)
    for record in (record for records in by_rank for record in records):
        assert all(torch.isfinite(gradient).all() for gradient in record.gradients.values())


def _on_subgroups(rank: int, world_size: int) -> None:
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


def test_a_reducer_uses_the_group_that_is_named() -> None:
    run_ranks(_on_subgroups, 4)


def _without_gloo(rank: int, world_size: int) -> None:
    reference = run(rank, plain)
    for stage in (AllReduce(), AllGather(), Cast(torch.float32)):
        assert_parity(run(rank, chain(stage).register), reference, what=f"{stage!r} on autograd's thread")


def test_without_gloo_stages_run_on_autograds_thread() -> None:
    run_ranks(_without_gloo, 2, backend=UNKNOWN_BACKEND)
