"""What ranks write in the store is deleted when all have left it behind, and not before; so a store does not grow."""

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import Join, ZeroRedundancyOptimizer
from overlap.ranks.board import agree

_ROUNDS = 4
_TIMEOUT_S = 20


def _joined(ddp: Any, rank: int) -> None:
    with Join([ddp]) as join:
        for batch in join.iterate(MLP.batches(rank, steps=9 if rank else 2)):
            mean_squared_error(ddp, batch).backward()


def _consolidate(ddp: Any, rank: int) -> None:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    zero.step()
    zero.consolidate_state_dict()


def _keys(rank: int, world_size: int, port: int) -> dict[str, list[list[str]]]:
    """Of each loop the keys in the store after each round, when the ranks have agreed once more."""
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    found: dict[str, list[list[str]]] = {}
    for run in (_joined, _consolidate):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        for _ in range(_ROUNDS):
            run(ddp, rank)
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
