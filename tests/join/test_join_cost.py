"""How many collectives an iteration costs under Join, counted by the process group and by the polls themselves."""

from collections.abc import Iterable
from typing import Any

import pytest
from join_loops import TOLD_BY, joined
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import run_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case, mean_squared_error
from overlap.join import context

_STEPS, _FEWER = 8, 5
# The first backward is of one bucket, and the forward after it rebuilds them.
_SETTLED = 2


def _per_iteration(ddp: Any, batches: Iterable[Any]) -> float:
    """Collectives on the model's own process group, from the end of one iteration to the end of a later one."""
    numbers = []
    for batch in batches:
        mean_squared_error(ddp, batch).backward()
        numbers.append(int(ddp.process_group._get_sequence_number_for_group()))
    return (numbers[-1] - numbers[_SETTLED]) / (len(numbers) - 1 - _SETTLED)


def _counts(rank: int, world_size: int, case: Case) -> tuple[dict[str, float], dict[str, int]]:
    """Collectives an iteration beyond plain training where rank 1 runs out first, and polls of the block."""
    own = case.batches(rank, steps=_FEWER if rank else _STEPS)

    def model() -> Any:
        return wrap(case.model(), **case.ddp_options())

    plain = _per_iteration(model(), case.batches(rank, steps=_STEPS))
    with TorchJoin([ddp := model()]):
        extra = {"PyTorch": _per_iteration(ddp, own) - plain}
    polls: dict[str, int] = {}

    class Counted(context._Poll):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            polls[told_by] = polls.get(told_by, 0) + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_Poll", Counted)
        for told_by in TOLD_BY:
            with joined([ddp := model()], own, told_by) as batches:
                extra[told_by] = _per_iteration(ddp, batches) - plain
    return extra, polls


def _all_counts(rank: int, world_size: int) -> list[Any]:
    return [_counts(rank, world_size, case) for case in (MLP, BATCH_NORM)]


def test_an_iteration_costs_one_poll_and_no_collective_of_the_model() -> None:
    """And once a rank has run out one poll more for each call that it replays."""
    for has_buffers, (extra, polls) in enumerate(run_ranks(_all_counts, 2, timeout_s=120)[0]):
        # Replayed are backwards, and forwards that synchronize buffers; one poll ends the block, and one says who has
        # run out.
        expected = _STEPS + 2 + (_STEPS - _FEWER) * (1 + has_buffers)
        for told_by in TOLD_BY:
            assert (extra[told_by], polls[told_by]) == (0, expected), told_by
        assert extra["PyTorch"] == 2 + has_buffers
