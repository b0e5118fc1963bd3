"""The models that parity is tested on: several buckets each, and the same weights and data at every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import trained

from harness import assert_parity, bucket_sizes_bytes, run_ranks, run_threads, wrap
from harness.models import CASES, MIN_BUCKETS, UNUSED_ON_SOME_RANKS, Case, mean_squared_error

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


def _buckets(rank: int, world_size: int, case: Case) -> tuple[list[int], list[int]]:
    """The sizes that a hook sees in the third step, and what `bucket_sizes_bytes` says after it."""
    seen: list[int] = []
    ddp = wrap(case.model(), **case.ddp_options())

    def record(state: None, bucket: Any) -> Any:
        seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    record.__annotations__.clear()  # DDP refuses annotations that are strings
    ddp.register_comm_hook(None, record)
    for batch in case.batches(rank, steps=3):
        seen.clear()
        mean_squared_error(ddp, batch).backward()
    return seen, bucket_sizes_bytes(ddp)


@EVERY_CASE
@pytest.mark.parametrize("run", [run_ranks, run_threads])
def test_every_model_has_several_buckets_of_the_sizes_that_are_told(run: Any, case: Case) -> None:
    for seen, told in run(_buckets, 2, case):
        assert len(seen) >= MIN_BUCKETS
        assert sorted(told) == sorted(seen)


@EVERY_CASE
def test_weights_depend_on_the_seed_alone(case: Case) -> None:
    torch.manual_seed(1)
    first = case.model().state_dict()
    torch.manual_seed(2)
    assert_parity(case.model().state_dict(), first, what="weights")
    with pytest.raises(AssertionError):
        assert_parity(case.model(seed=1).state_dict(), first, what="weights")


@EVERY_CASE
def test_data_depends_on_step_and_rank_alone(case: Case) -> None:
    torch.manual_seed(1)
    first = case.batch(2, 1)
    torch.manual_seed(2)
    assert_parity(case.batch(2, 1), first, what="data")
    with pytest.raises(AssertionError):
        assert_parity(case.batch(2, 0), first, what="data")


def test_an_unused_branch_gets_its_gradient_from_the_other_rank() -> None:
    for records in run_threads(trained, 2, UNUSED_ON_SOME_RANKS):
        gradients = records[0].gradients
        assert gradients is not None
        assert gradients["branch.weight"] is not None
        assert gradients["branch.weight"].any()
