"""The models that parity is tested on: several buckets each, and the same weights and data at every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import trained

from harness import assert_parity, bucket_sizes_bytes, run_ranks, run_threads, wrap
from harness.models import CASES, MIN_BUCKETS, UNUSED_ON_SOME_RANKS, Case, mean_squared_error


def _sizes(case: Case, rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """The sizes that a hook sees in the third step, and those of `bucket_sizes_bytes` after it."""
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


def _buckets(rank: int, world_size: int) -> None:
    for case in CASES:
        seen, reported = _sizes(case, rank, world_size)
        assert len(seen) >= MIN_BUCKETS, case
        assert sorted(reported) == sorted(seen), case


@pytest.mark.parametrize("run", [run_ranks, run_threads])
def test_every_model_has_several_buckets_of_the_sizes_that_are_reported(run: Any) -> None:
    run(_buckets, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_and_data_depend_on_their_arguments_alone(case: Case) -> None:
    torch.manual_seed(1)
    first = case.model().state_dict(), case.batch(2, 1)
    torch.manual_seed(2)
    assert_parity((case.model().state_dict(), case.batch(2, 1)), first, what="weights and data")
    for other in ((case.model(seed=1).state_dict(), first[1]), (first[0], case.batch(2, 0))):
        with pytest.raises(AssertionError):
            assert_parity(other, (case.model().state_dict(), case.batch(2, 1)), what="weights and data")


def test_an_unused_branch_gets_its_gradient_from_the_other_rank() -> None:
    for records in run_threads(trained, 2, UNUSED_ON_SOME_RANKS):
        gradients = records[0].gradients
        assert gradients is not None
        assert gradients["branch.weight"] is not None
        assert gradients["branch.weight"].any()
