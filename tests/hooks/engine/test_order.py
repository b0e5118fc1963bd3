"""One order of collectives on every rank, whatever the timing."""

import random
import time
from unittest import mock

import torch
import torch.distributed as dist

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import Bucket, Stage, chain
from overlap.hooks import all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.engine import executors

SEEDS = 15


def _numel(bucket_index: int, place: int) -> int:
    """A size of its own for each collective, so that any two that pair up wrongly do not fit."""
    return 1000 + 100 * bucket_index + 10 * place


class Jittery(Stage):
    """One to three collectives a bucket, of sizes of their own, with random pauses around each."""

    def __init__(self, rank: int, seed: int) -> None:
        self.random = random.Random(f"{seed} {rank}")
        self.checked = 0

    def pause(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.uniform(0, 0.002))

    async def __call__(self, bucket: Bucket) -> None:
        ranks, rank = bucket.group.size(), bucket.group.rank()
        for place in range(1 + bucket.index % 3):
            self.pause()
            numel = _numel(bucket.index, place)
            tensor = torch.full((numel,), float(rank + 1))
            kind = (bucket.index + place) % 4
            total = ranks * (ranks + 1) / 2
            if kind == 0:
                await all_reduce(tensor)
                expected = torch.full((numel,), total)
            elif kind == 1:
                tensor_all = torch.empty(ranks * numel)
                await all_gather(tensor_all, tensor)
                tensor, expected = tensor_all, torch.arange(1.0, ranks + 1).repeat_interleave(numel)
            elif kind == 2:
                part = torch.empty(numel)
                await reduce_scatter(part, tensor.repeat(ranks))
                tensor, expected = part, torch.full((numel,), total)
            else:
                received = torch.empty(numel)
                await send_recv([(tensor, (rank + 1) % ranks)], [(received, (rank - 1) % ranks)])
                tensor, expected = received, torch.full((numel,), float((rank - 1) % ranks + 1))
            assert torch.equal(tensor, expected), f"bucket {bucket.index}, collective {place}"
            self.checked += 1


def _delayed_backwards(rank: int, world_size: int, seeds: int) -> int:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    stage = Jittery(rank, 0)
    chain(stage).register(ddp)
    for parameter in ddp.parameters():
        parameter.register_hook(lambda grad: stage.pause())  # Delays arrivals, on the training thread.
    for seed in range(seeds):
        stage.random.seed(f"{seed} {rank}")
        ddp(*MLP.batch(seed, rank).inputs).sum().backward()
        # A collective on the training thread between backwards: nothing of the worker's may pair up with it.
        flag = torch.tensor([rank])
        dist.all_reduce(flag)
        assert flag.item() == world_size * (world_size - 1) / 2
    return stage.checked


def _inline_and_on_a_worker(rank: int, world_size: int) -> list[int]:
    counts = []
    for limit_bytes in (0, 2**20):
        with mock.patch.object(executors, "SMALL_BYTES", limit_bytes):
            counts.append(_delayed_backwards(rank, world_size, SEEDS))
    return counts


def test_collectives_pair_up_under_random_delays() -> None:
    first, *others = run_ranks(_inline_and_on_a_worker, 3, timeout_s=110)
    assert all(other == first for other in others) and min(first) >= SEEDS * 5
