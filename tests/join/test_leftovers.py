"""What ranks leave in the store is deleted when all have read it, and not before; so a store does not grow."""

from __future__ import annotations

import contextlib
import datetime
import gc
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap
from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    DQuantType,
    Join,
    OverlappedOptimizer,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.join.leftovers import leave
from overlap.join.meeting import meet

_ROUNDS = 6
_TIMEOUT_S = 20


def test_keys_are_there_until_the_last_rank_has_left() -> None:
    store = dist.HashStore()
    store.set("told", "text")
    for _ in range(2):
        leave(store, size=3, keys=["told"])
        assert store.get("told") == b"text", "a rank is still to read it"
    leave(store, size=3, keys=["told"])
    assert store.num_keys() == 0


class _Loop:
    """What a round does on one rank, in a group whose store is watched."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0
        self.ddp = wrap(MLP.model(), **MLP.ddp_options())
        self.optim = OverlappedOptimizer(torch.optim.SGD(self.ddp.parameters(), lr=0.1))
        self.fails = False
        self.all_reduce = overlap.auto_quantize(dist.all_reduce, DQuantType.FP16)

    def _train(self, batches: Any, *, fails_at: int = -1) -> None:
        for number, batch in enumerate(batches):
            if number == fails_at:
                raise ValueError("the dog ate it")
            mean_squared_error(self.ddp, batch).backward()

    def known(self) -> None:
        with Join([self.ddp]) as join:
            self._train(join.iterate(MLP.batches(self.rank, steps=30 if self.rank else 2)))

    def polled(self) -> None:
        with Join([self.ddp]) as join:
            self._train(join.iterate(iter(MLP.batches(self.rank, steps=30 if self.rank else 2))))

    def forwards(self) -> None:
        with Join([self.ddp]):
            self._train(MLP.batches(self.rank, steps=30 if self.rank else 2))

    def raise_where_exhausted(self) -> None:
        with pytest.raises(TrainingLoopError), Join([self.ddp], on_exhausted="raise") as join:
            self._train(join.iterate(MLP.batches(self.rank, steps=4 + self.rank)))

    def fail_under_join(self) -> None:
        batches = MLP.batches(self.rank, steps=6 if self.rank else 2)
        with pytest.raises((ValueError, CollectiveError)), Join([self.ddp]) as join:
            self._train(join.iterate(batches), fails_at=4 if self.rank else -1)

    def fail_in_backward(self) -> None:
        async def failing(bucket: overlap.Bucket) -> None:
            if self.fails and self.rank:
                raise ValueError("the dog ate it")

        if self.number == 0:
            chain(failing, AllReduce(), Step(self.optim)).register(self.ddp)
        for self.fails in (True, False):
            with contextlib.suppress(ValueError, CollectiveError):
                mean_squared_error(self.ddp, MLP.batch(0, self.rank)).backward()
                self.optim.step()

    def register_and_remove(self) -> None:
        with chain(AllReduce(), Step(self.optim)).register(self.ddp):
            mean_squared_error(self.ddp, MLP.batch(0, self.rank)).backward()
            self.optim.step()

    def make_zeros(self) -> None:
        zero = ZeroRedundancyOptimizer(
            self.ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, overlap_with_ddp=True
        )
        with chain(ZeroStep(zero)).register(self.ddp):
            mean_squared_error(self.ddp, MLP.batch(0, self.rank)).backward()
            zero.step()
        zero.consolidate_state_dict()

    def fail_to_make_zeros(self) -> None:
        with pytest.raises((ValueError, CollectiveError)):
            ZeroRedundancyOptimizer([] if self.rank else self.ddp.parameters(), torch.optim.SGD, lr=0.1)

    def save_and_load(self) -> None:
        if self.number == 0:
            chain(AllReduce(), Step(self.optim)).register(self.ddp)
        run = overlap.TrainState(self.ddp, self.optim)
        run.load_state_dict(run.state_dict())

    def quantize(self) -> None:
        self.all_reduce(torch.ones(self.number + 1))


_LOOPS: list[Callable[[_Loop], None]] = [
    _Loop.known,
    _Loop.polled,
    _Loop.forwards,
    _Loop.raise_where_exhausted,
    _Loop.fail_under_join,
    _Loop.fail_in_backward,
    _Loop.register_and_remove,
    _Loop.make_zeros,
    _Loop.fail_to_make_zeros,
    _Loop.save_and_load,
    _Loop.quantize,
]


def _release_what_is_over(lasting: set[threading.Thread]) -> None:
    """Else a round would show what its last registration left on some runs, and on others not."""
    gc.collect()
    for thread in set(threading.enumerate()) - lasting:
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive(), f"{thread} of this round goes on"


def _keys(rank: int, world_size: int, port: int, name: str) -> list[list[str]]:
    """What is in the store after each round, when the ranks have met once more."""
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    loop, found = _Loop(rank), []
    gc.disable()
    for loop.number in range(_ROUNDS):
        lasting = set(threading.enumerate())
        getattr(loop, name)()
        if loop.number > 0:  # The threads of the first round may be for all.
            _release_what_is_over(lasting)
        dist.barrier()
        meet(dist.group.WORLD, "say what was released")
        dist.barrier()
        found.append(sorted(store.list_keys()))
        dist.barrier()
    return found


@pytest.mark.parametrize("name", [loop.__name__ for loop in _LOOPS])
def test_a_store_does_not_grow_from_round_to_round(name: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    found, _ = run_ranks(_keys, 2, port, name, backend=None)
    numbers = [len(keys) for keys in found]
    assert len(set(numbers[1:])) == 1, f"{numbers}, and since the second round {set(found[-1]) - set(found[1])}"
    assert numbers[-1] <= 10, found[-1]
