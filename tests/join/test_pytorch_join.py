"""The behaviour that PyTorch documents and tests of its ``Join``, of both Joins; and our joinables in PyTorch's."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_loops import TOLD_BY, assert_same_on_every_rank, joined, make, overlapped_body, snapshot
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook

from harness import on_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Join,
    LocalSGD,
    UnsupportedError,
    chain,
)

JOINS = {"ours": Join, "PyTorch's": TorchJoin}
_BEFORE, _AFTER = 42, 43


class _Counter(Joinable):
    """Counts the ranks that take part in each call, in ``collectives`` all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.total, self.marker = 0, 0.0, torch.tensor([_BEFORE])

    def __call__(self, collectives: int = 1) -> None:
        Join.notify_join_context(self)
        self.calls += 1
        self.total += sum(self.reduce(1.0) for _ in range(collectives))

    def reduce(self, value: float) -> float:
        dist.all_reduce(tensor := torch.full((1,), value))
        return tensor.item()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _CounterHook(self, **kwargs)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class _CounterHook(JoinHook):
    def __init__(self, counter: _Counter, collectives: int = 1, marks: bool = False) -> None:
        self.counter, self.collectives, self.marks = counter, collectives, marks

    def main_hook(self) -> None:
        self.counter.calls += 1
        for _ in range(self.collectives):
            self.counter.reduce(0.0)

    def post_hook(self, is_last_joiner: bool) -> None:
        """One of the last ranks to join writes the marker of all."""
        if self.marks:
            source = int(-self.counter.reduce(-float(is_last_joiner) * (dist.get_rank() + 1))) - 1
            if dist.get_rank() == source:
                self.counter.marker.fill_(_AFTER)
            dist.broadcast(self.counter.marker, source)


_BATCHES = (2, 4, 5)  # Only one rank is the last.

# Of each behaviour the number of joinables, and the options of Join.
BEHAVIOURS: dict[str, tuple[int, dict[str, Any]]] = {
    "main hooks": (1, {}),
    "post hooks": (1, {"marks": True, "collectives": 0}),
    "main and post hooks": (1, {"marks": True}),
    "several joinables": (3, {"marks": True}),
    "disabled": (1, {"enable": False, "marks": True}),
    "several, disabled": (3, {"enable": False, "marks": True}),
    "throw_on_early_termination": (1, {"throw_on_early_termination": True}),
    "several, throw_on_early_termination": (3, {"throw_on_early_termination": True}),
    "keyword arguments": (1, {"collectives": 3, "marks": True}),
}


def _count(join: Any, counters: list[_Counter], number: int, collectives: int) -> None:
    with join:
        for _ in range(number):
            for counter in counters:
                counter(collectives)


@on_ranks(3)
def test_both_joins_behave_alike(rank: int, world_size: int) -> None:
    for kind, join in JOINS.items():
        for name, (number, options) in BEHAVIOURS.items():
            cell, is_enabled = f"{kind}: {name}", options.get("enable", True)
            counts = _BATCHES if is_enabled else (3, 3, 3)  # Without Join ranks must have as many.
            counters, collectives = [_Counter() for _ in range(number)], options.get("collectives", 1)
            if options.get("throw_on_early_termination"):
                words = "Rank 0 exhausted all inputs." if rank == 0 else "Detected at least one rank that exhausted"
                with pytest.raises(RuntimeError, match=re.escape(words)):
                    _count(join(counters, **options), counters, counts[rank], collectives)
                dist.barrier()
                assert [counter.total for counter in counters] == [3.0 * min(counts)] * number, cell
                continue
            _count(join(counters, **options), counters, counts[rank], collectives)
            taking_part = sum(sum(step < count for count in counts) for step in range(counts[rank]))
            marker = _AFTER if is_enabled and options.get("marks") else _BEFORE
            for counter in counters:
                found = counter.calls, counter.total, counter.marker.item()
                assert found == (max(counts), collectives * taking_part, marker), cell


@on_ranks(3)
def test_a_joinable_may_notify_in_every_second_iteration(rank: int, world_size: int) -> None:
    """In every second iteration, which PyTorch's Join cannot follow."""
    for told_by in TOLD_BY:
        ddp, counter = wrap(MLP.model(), **MLP.ddp_options()), _Counter()
        with joined([counter, ddp], list(range((7, 4, 2)[rank])), told_by) as numbers:
            for number in numbers:
                mean_squared_error(ddp, MLP.batch(number, rank)).backward()
                if number % 2:
                    counter()
        assert counter.calls == 3


# Our joinables in PyTorch's Join.


_ADAMW: dict[str, Any] = {"cls": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1}


def _local_sgd(ddp: Any) -> Any:
    return LocalSGD(ddp, make(ddp, "plain", lr=0.1), period=2)


@on_ranks(2)
def test_ranks_are_equal_after_pytorchs_join_or_it_is_refused(rank: int, world_size: int) -> None:
    def train(ddp: Any, optim: Any, join: Any) -> None:
        with join:
            for batch in MLP.batches(rank, steps=2 + 3 * rank):
                overlapped_body(ddp, optim, batch, 1.0)

    for build in (partial(make, form="interleaved", **_ADAMW), partial(make, form="zero", lr=0.1), _local_sgd):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optim = build(ddp)
        with pytest.raises(ConfigurationError, match=r"comes before its model in PyTorch's Join.*Join\(\[ddp, "):
            train(ddp, optim, TorchJoin([optim, ddp]))
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optim = build(ddp)
        train(ddp, optim, TorchJoin([ddp, optim]))
        assert_same_on_every_rank(snapshot(ddp, None), what="of joinables")
    for is_method in (True, False):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optim = make(ddp, "deferred", **_ADAMW)
        train(ddp, optim, ddp.join() if is_method else TorchJoin([ddp, optim]))
        assert_same_on_every_rank(snapshot(ddp, optim), what="after PyTorch's Join")
        # Gradients that a joined rank left must not be added to.
        overlapped_body(ddp, optim, MLP.batch(9, rank), 1.0)
        assert_same_on_every_rank(snapshot(ddp, optim), what="in the next step")
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    with (
        pytest.raises(UnsupportedError, match=r"overlap\.Join"),
        ddp.join(divide_by_initial_world_size=False),
    ):
        ddp(*MLP.batch(0, rank).inputs)
