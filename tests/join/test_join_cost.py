"""How many collectives an iteration costs under Join, counted by the process group itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from join_loops import TOLD_BY, joined
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import run_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case, mean_squared_error
from overlap import AllReduce, chain

_STEPS = 8
# The first backward is of one bucket, and the forward after it rebuilds them.
_SETTLED = 2


def _issued(ddp: Any) -> int:
    return int(ddp.process_group._get_sequence_number_for_group())


def _per_iteration(ddp: Any, batches: Iterable[Any]) -> float:
    """Collectives on the model's own process group, from the end of one iteration to the end of a later one."""
    numbers = []
    for batch in batches:
        mean_squared_error(ddp, batch).backward()
        numbers.append(_issued(ddp))
    return (numbers[-1] - numbers[_SETTLED]) / (len(numbers) - 1 - _SETTLED)


def _model(case: Case, *, registered: bool) -> Any:
    ddp = wrap(case.model(), **case.ddp_options())
    if registered:
        chain(AllReduce()).register(ddp)
    return ddp


def _count(rank: int, world_size: int, steps: int, case: Case) -> dict[str, list[float]]:
    """What each way of joining costs on top of plain training, where rank 1 has ``steps`` batches."""
    batches = [case.batch(step, rank) for step in range(_STEPS)]
    own = batches if rank == 0 else batches[:steps]
    extra: dict[str, list[float]] = {told_by: [] for told_by in (*TOLD_BY, "PyTorch")}
    for registered in (False, True):
        plain = _per_iteration(_model(case, registered=registered), batches)
        assert plain > 0 or registered, "buckets are reduced on the model's own group where nothing is registered"
        for told_by in TOLD_BY:
            ddp = _model(case, registered=registered)
            with joined([ddp], own, told_by) as iterated:
                extra[told_by].append(_per_iteration(ddp, iterated) - plain)
        if not registered:
            ddp = _model(case, registered=False)
            with TorchJoin([ddp]):
                extra["PyTorch"].append(_per_iteration(ddp, own) - plain)
    return extra


def _counts(rank: int, world_size: int) -> list[dict[str, list[float]]]:
    return [_count(rank, world_size, steps, case) for steps, case in CASES]


# Batches of the rank that runs out, of as many as the other one has; and the model.
CASES = ((5, MLP), (5, BATCH_NORM))


def test_known_lengths_cost_nothing_and_unknown_ones_less_than_pytorchs_join() -> None:
    """Collectives per iteration that joining adds, without and with a registered chain."""
    for (steps, case), costs in zip(CASES, run_ranks(_counts, 2, timeout_s=120)[0], strict=True):
        has_buffers = case is BATCH_NORM
        for told_by in ("lengths", "loader"):
            assert costs[told_by] == [0, 0], told_by
        replayed = 2 if has_buffers else 1  # A backward, and a forward that synchronizes buffers.
        for told_by in ("forwards", "stream"):
            expected = 1 + replayed * (_STEPS - steps) / (_STEPS - 1 - _SETTLED)
            assert costs[told_by] == pytest.approx([expected] * 2), told_by
        assert costs["PyTorch"] == [3 if has_buffers else 2]
