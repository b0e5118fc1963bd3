"""A joinable of the user's in both Joins, and our joinables in PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from join_loops import POLLED, joined, overlapped_body, snapshot
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, Join, Joinable, JoinHook, OverlappedOptimizer, Step, UnsupportedError, chain

_BATCHES = (7, 4, 2)
JOINS = {"ours": Join, "PyTorch's": TorchJoin}


class _Average(Joinable):
    """The mean of a number over ranks, once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.calls, self.last = torch.zeros(1), 0, [False]

    def step(self, value: float | None = None) -> None:
        Join.notify_join_context(self)
        self.reduce(value)

    def reduce(self, value: float | None = None) -> None:
        self.value = torch.full((1,), value or 0.0)
        torch.distributed.all_reduce(self.value)
        self.calls += 1

    def join_hook(self, **kwargs: Any) -> JoinHook:
        average = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                average.reduce()

            def post_hook(self, is_last_joiner: bool) -> None:
                average.last = [is_last_joiner, kwargs]

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return torch.distributed.group.WORLD


def _beside_a_model(rank: int, world_size: int, told_by: str) -> Any:
    ddp, average = wrap(MLP.model(), **MLP.ddp_options()), _Average()
    with joined([average, ddp], list(range(_BATCHES[rank])), told_by, colour="green") as numbers:
        for number in numbers:
            mean_squared_error(ddp, MLP.batch(number, rank)).backward()
            if number % 2:
                average.step(1.0)
    return average.calls, average.value.item(), average.last


@pytest.mark.parametrize("told_by", POLLED)
def test_a_joinable_may_notify_in_every_second_iteration(told_by: str) -> None:
    """Which PyTorch's Join cannot follow."""
    results = run_ranks(_beside_a_model, 3, told_by)
    assert results == [(3, 1.0, [rank == 0, {"colour": "green"}]) for rank in range(3)]


def _by_themselves(rank: int, world_size: int, kind: str) -> list[Any]:
    found: list[Any] = []
    for number in (1, 3):
        averages = [_Average() for _ in range(number)]
        with JOINS[kind](averages, colour="green"):
            for _ in range(_BATCHES[rank]):
                for average in averages:
                    average.step(1.0)
        found += [[average.calls, average.value.item(), average.last] for average in averages]
    averages = [_Average() for _ in range(2)]
    words = "Detected at least one rank that exhausted inputs" if rank < 2 else "Rank 2 exhausted all inputs"
    throws = pytest.raises(RuntimeError, match=words)
    with throws, JOINS[kind](averages, throw_on_early_termination=True):
        for _ in range(_BATCHES[rank]):
            for average in averages:
                average.step(1.0)
    return found


@pytest.mark.parametrize("kind", JOINS)
def test_joinables_by_themselves_work_in_both_joins(kind: str) -> None:
    results = run_ranks(_by_themselves, 3, kind)
    assert results == [[[7, 1.0, [rank == 0, {"colour": "green"}]]] * 4 for rank in range(3)]


def _pytorchs_join(rank: int, world_size: int, is_method: bool) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1))
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    ended = []
    with ddp.join() if is_method else TorchJoin([ddp, optimizer]):
        for step in range(4 - rank):
            overlapped_body(ddp, optimizer, MLP.batch(step, rank), 1.0)
    ended.append(snapshot(ddp, optimizer))
    # Gradients that a joined rank left must not be added to.
    overlapped_body(ddp, optimizer, MLP.batch(9, rank), 1.0)
    ended.append(snapshot(ddp, optimizer))
    return ended


@pytest.mark.parametrize("is_method", [True, False], ids=["ddp.join()", "Join([ddp, optimizer])"])
def test_ranks_are_equal_after_pytorchs_join_and_after_one_more_step(is_method: bool) -> None:
    first, second = run_ranks(_pytorchs_join, 2, is_method)
    assert_parity(second, first, what="after PyTorch's Join, and one more step")


def _divides_by_count(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    with (
        pytest.raises(UnsupportedError, match=r"overlap\.Join"),
        ddp.join(divide_by_initial_world_size=False),
    ):
        ddp(*MLP.batch(0, rank).inputs)


def test_dividing_by_active_ranks_in_pytorchs_join_is_refused_with_a_chain() -> None:
    run_ranks(_divides_by_count, 2)
