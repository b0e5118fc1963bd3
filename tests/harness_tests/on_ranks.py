"""What the ranks of these tests do: work together, raise, die, hang, train."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import Record, train, wrap
from harness.models import Case


def reduced(rank: int, world_size: int, factor: float) -> tuple[int, Tensor]:
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    return rank, tensor * factor


def one_raises(rank: int, world_size: int, error: Exception) -> None:
    if rank == 1:
        raise error
    dist.barrier()


def one_dies(rank: int, world_size: int, sign: int | None) -> None:
    if rank == 1:
        print("last words", flush=True)
        if sign is not None:
            os.kill(os.getpid(), sign)
        os._exit(7)
    dist.barrier()


def one_sleeps_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def gradient(rank: int, world_size: int) -> Tensor:
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    ddp(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert ddp.module.weight.grad is not None
    return ddp.module.weight.grad


def trained(rank: int, world_size: int, case: Case, **options: Any) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return train(ddp, optimizer, case.batches(rank, steps=4), gradients=True, **options)
