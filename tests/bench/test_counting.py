"""How many bytes ranks send: counted on sockets and at the collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from overlap.bench.collectives import COUNTED_BACKEND, counted_bytes, register_counted_backend, sent_bytes
from overlap.bench.wire import socket_bytes

_NUMEL = 400_000


@pytest.mark.parametrize("ranks", [2, 4])
def test_sockets_and_collectives_count_the_same_all_reduce(ranks: int, tmp_path: Path) -> None:
    def count(rank: int, world_size: int, folder: str) -> tuple[float, float]:
        register_counted_backend(dist.ProcessGroupGloo)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(COUNTED_BACKEND, store=store, rank=rank, world_size=world_size)
        tensor = torch.ones(_NUMEL)
        dist.all_reduce(tensor)
        dist.barrier()
        before = socket_bytes(), counted_bytes()
        for _ in range(2):
            dist.all_reduce(tensor.fill_(1.0))
        # Only when all have received is all of it sent; a barrier sends a few bytes itself.
        dist.barrier()
        sent = (socket_bytes() - before[0]) / 2, (counted_bytes() - before[1]) / 2
        assert torch.equal(tensor, torch.full((_NUMEL,), float(world_size)))
        dist.destroy_process_group()
        return sent

    results = run_ranks(count, ranks, str(tmp_path), backend=None)
    expected = 2 * 4 * _NUMEL * (ranks - 1) / ranks
    for on_sockets, at_collectives in results:
        assert on_sockets == pytest.approx(expected, rel=0.02)
        assert at_collectives == expected


def test_volumes_of_the_other_collectives() -> None:
    assert sent_bytes("all_gather", 400, 4) == sent_bytes("reduce_scatter", 400, 4) == 300
    assert sent_bytes("all_reduce", 400, 4) == 600
    assert sent_bytes("send", 400, 4) == 400
    assert sent_bytes("barrier", 400, 4) == 0
