"""What ranks write in the store is deleted when all have left it behind, and not before; so a store does not grow."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import Join, ZeroRedundancyOptimizer
from overlap.ranks.board import agree

_ROUNDS = 4
_TIMEOUT_S = 20


class _Loop:
    """What a round does on one rank, in a group whose store is watched."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ddp = wrap(MLP.model(), **MLP.ddp_options())

    def _train(self, batches: Any) -> None:
        for batch in batches:
            mean_squared_error(self.ddp, batch).backward()

    def joined(self) -> None:
        with Join([self.ddp]) as join:
            self._train(join.iterate(MLP.batches(self.rank, steps=9 if self.rank else 2)))

    def consolidate(self) -> None:
        zero = ZeroRedundancyOptimizer(self.ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        mean_squared_error(self.ddp, MLP.batch(0, self.rank)).backward()
        zero.step()
        zero.consolidate_state_dict()


_LOOPS: list[Callable[[_Loop], None]] = [
    _Loop.joined,
    _Loop.consolidate,
]


def _keys(rank: int, world_size: int, port: int) -> dict[str, list[list[str]]]:
    """Of each loop the keys in the store after each round, when the ranks have agreed once more."""
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    found: dict[str, list[list[str]]] = {}
    for run in _LOOPS:
        loop = _Loop(rank)
        for _ in range(_ROUNDS):
            run(loop)
            dist.barrier()
            agree(dist.group.WORLD, "leave a round behind")
            dist.barrier()
            found.setdefault(run.__name__, []).append(sorted(store.list_keys()))
            dist.barrier()
    return found


def test_a_store_does_not_grow_from_round_to_round() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    found, _ = run_ranks(_keys, 2, port, backend=None, timeout_s=120)
    for name, keys in found.items():
        numbers = [len(each) for each in keys]
        assert len(set(numbers[1:])) == 1, f"{name}: {numbers}, since the second {set(keys[-1]) - set(keys[1])}"
    assert len(keys[-1]) <= 24, keys[-1]
