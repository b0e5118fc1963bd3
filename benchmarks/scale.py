"""The work and the memory of one rank on an accelerator against the number of ranks, measured without one.

    python -m benchmarks.scale [--ranks 8 64 512 4096] [--buckets 4] [--only TEXT] [--into docs/reports/scale.md]

As `benchmarks.host_cost`: PyTorch's fake process group stands for the ranks, streams do nothing, collectives are free.
So it shows the host's side alone: Python calls and operators of a bucket, Python's tensors that are kept for it and in
all after a step, and the thread's time of a bucket, of the constructor of the optimizer and of the registration.
"""

from __future__ import annotations

import argparse
import gc
import operator
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import host_cost
from benchmarks.host_cost import ADAMW, Operators, calls_counted, model_on, step, timed
from benchmarks.pages import in_columns, in_markdown, write_between
from benchmarks.recipes import Recipe, reduced, sharded
from overlap import AllReduce, Cast, Int4, Int8, PowerSGD, Quantize
from overlap.hooks.engine.registration import registration_of

_WARM_UP = 4
_calls, _operators, _tensors = map(operator.attrgetter, ("calls", "operators", "tensors"))
METHODS: dict[str, Recipe] = {
    "AllReduce": reduced(AllReduce),
    "Cast(bfloat16)": reduced(lambda: Cast(torch.bfloat16, AllReduce())),
    "DivideByCount, AllReduce": host_cost.METHODS["DivideByCount, AllReduce"][1],
    "PowerSGD(rank=4)": reduced(lambda: PowerSGD(rank=4)),
    "Quantize(Int8())": reduced(lambda: Quantize(Int8())),
    "Quantize(Int4()), feedback": reduced(lambda: Quantize(Int4(), error_feedback=True)),
    "ZeroStep": sharded(),
    "ZeroStep, in forward": sharded(gather="forward"),
    "ZeroStep, by parameter": sharded(partition="parameter"),
}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of a step, and of making the update and the registration; these do not vary."""

    calls: int
    operators: int
    tensors: int
    """That exist after a step, and did not before the update was made."""
    made_calls: int


def counts(method: str, ranks: int, buckets: int, *, width: int = 48) -> Counts:
    with model_on(ranks, buckets, width) as (ddp, x):
        before = tensors_alive()
        with calls_counted() as made:
            update = METHODS[method](ddp, ADAMW)
        for _ in range(_WARM_UP):
            step(ddp, update, x)
        with calls_counted() as calls:
            step(ddp, update, x)
        with Operators() as operators:
            step(ddp, update, x)
        update.finish()
        return Counts(
            calls=calls[0], operators=operators.counts.total(), tensors=tensors_alive() - before, made_calls=made[0]
        )


def tensors_alive() -> int:
    """How many tensors Python has."""
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of this thread."""

    made_ms: float
    """Of the update and the registration, and of the first steps, in which buckets are first seen."""
    bucket_us: float


def times(method: str, ranks: int, buckets: int, *, steps: int = 5) -> Times:
    with model_on(ranks, buckets) as (ddp, x):
        start_s = time.thread_time()
        update = METHODS[method](ddp, ADAMW)
        made_s = time.thread_time() - start_s
        for _ in range(_WARM_UP):
            step(ddp, update, x)
        in_buckets_s: list[float] = []
        registration = registration_of(ddp)
        assert registration is not None, "every method has a chain"
        runtime: Any = registration.runtime
        runtime.on_bucket = timed(runtime.on_bucket, in_buckets_s)
        for _ in range(steps):
            step(ddp, update, x)
        update.finish()
    return Times(made_ms=1e3 * made_s, bucket_us=1e6 * statistics.median(in_buckets_s))


def _row(method: str, ranks: Sequence[int], buckets: int) -> list[str]:
    columns: list[list[str]] = []
    for number in ranks:
        few, many = counts(method, number, 4), counts(method, number, 8)
        took = times(method, number, buckets)
        a_bucket = [(of(many) - of(few)) / 4 for of in (_calls, _operators, _tensors)]
        columns.append([f"{one:,.0f}" for one in (*a_bucket, took.bucket_us, took.made_ms)])
    # A number that is the same for all is said once.
    return [method, *(one[0] if len(set(one)) == 1 else " / ".join(one) for one in zip(*columns, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--only", default="", metavar="TEXT", help="methods whose name contains it")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="replace the table of this page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["chain", "calls", "operators", "tensors kept", "us", "made in, ms"]]
    rows += [_row(method, options.ranks, options.buckets) for method in METHODS if options.only in method]
    print(in_columns(rows))
    if options.into is not None:
        write_between(options.into, "<!-- scale -->", "<!-- end of scale -->", in_markdown(rows))


if __name__ == "__main__":
    main()
