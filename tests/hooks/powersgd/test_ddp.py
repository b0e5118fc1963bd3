"""On real ranks: many buckets on Gloo."""

import copy
from typing import Any

import torch
import torch.distributed as dist

from harness import Record, assert_parity, on_ranks, train, wrap
from harness.models import TRANSFORMER
from overlap import PowerSGD, register


def _run(rank: int, stage: PowerSGD, *, min_buckets: int = 3, **options: Any) -> list[Record]:
    ddp = wrap(TRANSFORMER.model(), **{**TRANSFORMER.ddp_options(), **options})
    register(ddp, stage)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    return train(ddp, optimizer, TRANSFORMER.batches(rank, steps=6), min_buckets=min_buckets, gradients=True)


@on_ranks(2, timeout_s=180)
def test_many_buckets_are_as_one(rank: int, world_size: int) -> None:
    """One bucket is another order of collectives and other batches, but the same memory by parameter."""
    for alternate in (False, True):
        many, one = (PowerSGD(rank=2, min_compression_rate=1, alternate=alternate) for _ in range(2))
        records = _run(rank, many)
        assert many.compression_stats()[0] > 1.5
        first = copy.deepcopy(records[-1].parameters)
        for parameter in first.values():
            dist.broadcast(parameter, 0)
        assert_parity(records[-1].parameters, first, what="parameters of rank 0")
        assert_parity(
            records,
            _run(rank, one, min_buckets=1, bucket_cap_mb=25),
            what=f"{alternate=}, cut in many buckets",
            rtol=1e-3,
            atol=1e-5,
            reason="collectives of other sizes add up in another order, and six steps depend on each other",
        )
