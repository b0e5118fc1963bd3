"""With ``AllReduce()`` every attachment equals FSDP's own reduction in every bit, after every step."""

import itertools

import pytest
import torch
import torch.distributed as dist

import overlap
from harness import on_ranks

from .given import Case, assert_same, mesh_of, optimizer_of, run, sharded, step_of

DTYPES = (None, torch.bfloat16)
ACCUMULATIONS = ("none", "no_sync", "partial", "last")


@pytest.mark.parametrize("attachments", [("hsdp", "group"), ("replicate",)], ids=" and ".join)
@on_ranks(4, timeout_s=120)
def test_all_reduce_equals_native_reduction(rank: int, attachments: tuple[str, ...]) -> None:
    for dtype in DTYPES:
        cases = [Case(attachments[0], dtype, accumulation) for accumulation in ACCUMULATIONS]
        cases += [Case(attachments[0], dtype, accumulation="partial", adjust=one) for one in ("factor", "sums")]
        for case in cases:
            native = run(case)
            for attachment in attachments:
                reduced = run(case._replace(attachment=attachment), overlap.AllReduce())
                assert_same(native, reduced, (attachment, case))


@on_ranks(3)
def test_all_reduce_equals_native_reduction_where_the_mean_of_three_is_rounded(rank: int) -> None:
    for attachment, dtype in itertools.product(("hsdp", "replicate"), (*DTYPES, torch.float16)):
        case, mesh = Case(attachment, dtype), mesh_of((3, 1))
        assert_same(run(case, mesh=mesh), run(case, overlap.AllReduce(), mesh=mesh), case)


@on_ranks(4)
def test_passes_without_an_all_reduce_run_no_reducer(rank: int) -> None:
    """Names are those without the wrapper of a checkpoint; 3 microbatches of 4 units."""
    counts = []
    for attachment, accumulation in itertools.product(("hsdp", "group"), ("partial", "last")):
        model, group = sharded(Case(attachment))
        arrived = []

        @overlap.reducer
        async def counted(bucket: overlap.Bucket, arrived: list[str] = arrived) -> None:
            arrived.append(bucket.names[0])
            await overlap.hooks.all_reduce(bucket.buffer, group=bucket.group)
            bucket.buffer.div_(bucket.divisor)

        overlap.register(model, counted, group=group)
        step_of(model, optimizer_of(model), 0, accumulation)
        assert dist.get_rank() == rank and set(arrived) == {
            *("embed.weight", "blocks.0.first.weight", "blocks.1.first.weight", "blocks.2.first.weight")
        }
        counts.append(len(arrived))
    assert counts == [4, 12, 4, 12]
