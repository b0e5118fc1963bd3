"""The cost model of `overlap.auto` against measurements, for the rows of the benchmark.

    python benchmarks/cost_model.py [--models resnet18 transformer mlp] [--ranks 2 4] [--links 1gbit] [--rounds 8]
        [--rows NAME ...] [--into docs/auto.md]

For each model, number of ranks and link the ranks measure what `overlap.auto` does: the computation on a copy, the link
and what the reducers cost. That predicts each row. Then the rows themselves take turns, as in `overlap bench`. The
machine may be slower or faster by then: the computation, not the link, is scaled by what `compute-only` says of it,
which takes its turn among the rows, nine at a time; the figure without that stands beside it. Links take root;
`--links loopback` does not. Each cell is kept in `benchmarks/cost_model.json`, so it can be measured in parts. With
`--into` the table takes the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap import (
    AllReduce,
    Cast,
    Float8,
    Int4,
    Int8,
    PowerSGD,
    Quantize,
    TopK,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
import grid
import linked_ranks

from overlap.bench.registry import registry
from overlap.bench.settings import Settings
from overlap.bench.training_setup import TrainingSetup
from overlap.bench.variant import COMPUTE_ONLY
from overlap.bench.workload import workload
from overlap.plan.buckets import cut
from overlap.plan.candidates import Method
from overlap.plan.compute import measure, thread_rate
from overlap.plan.copies import Training
from overlap.plan.dry import measured_costs
from overlap.plan.link import Link
from overlap.plan.predict import schedule_of
from overlap.plan.profile import Profile
from overlap.plan.schedule import step_ms
from overlap.plan.wire_times import measure_link, measure_sharing

_HERE = Path(__file__).resolve()
RESULTS = _HERE.with_suffix(".json")
BEGIN, END = "<!-- cost model: written by benchmarks/cost_model.py -->", "<!-- end of cost model -->"
_PERIOD = 8
_CELL_S = 900.0
_LEAST_ROUNDS = 3
_AT_A_TIME = 9


def _in_backward(name: str, reducer: Any) -> Method:
    return Method(name=name, kind="exact", update="in backward", reducer=reducer)


def _after(name: str, reducer: Any = None) -> Method:
    return Method(name=name, kind="exact", update="after backward", reducer=reducer)


# The row's chain in the terms of the cost model. A row that is not here is not predicted: PyTorch's own sharded
# optimizers, which broadcast after the step, `hook_then_optimizer`, wires in sharded updates, Muon, and `Join`.
ROWS: dict[str, Method] = {
    method.name: method
    for method in (
        *(_after(name) for name in ("ddp-sgd", "ddp-sgd-fused", "ddp-adamw", "ddp-adamw-fused")),
        _in_backward("overlap-step-adamw", AllReduce),
        _after("overlap-step-adamw-deferred", AllReduce),
        *(Method(name=f"overlap-zero-{name}", kind="exact", update="sharded") for name in ("sgd", "adamw")),
        *(
            Method(name=f"overlap-zero-{name}-gather-forward", kind="exact", update="sharded, gathered in forward")
            for name in ("sgd", "adamw")
        ),
        *(_after(name, lambda: Cast(torch.float16, AllReduce())) for name in ("torch-fp16", "torch-fp16-adamw")),
        _in_backward("overlap-fp16", lambda: Cast(torch.float16, AllReduce())),
        _in_backward("overlap-bf16", lambda: Cast(torch.bfloat16, AllReduce())),
        _in_backward("overlap-powersgd-r4", lambda: PowerSGD(rank=4)),
        _in_backward("overlap-powersgd-r4-alternate", lambda: PowerSGD(rank=4, alternate=True)),
        _in_backward("overlap-powersgd-r4-int8", lambda: PowerSGD(rank=4, wire=Int8())),
        _in_backward("overlap-quantize8", lambda: Quantize(Int8())),
        _in_backward("overlap-quantize4", lambda: Quantize(Int4())),
        _in_backward("overlap-quantize4-feedback", lambda: Quantize(Int4(), error_feedback=True)),
        _in_backward("overlap-float8", lambda: Quantize(Float8())),
        _in_backward("overlap-topk1-feedback", lambda: Quantize(TopK(0.01), error_feedback=True)),
        *(
            Method(name=name, kind="exact", update="after backward")
            for name in ("torch-averager", "overlap-averager", "overlap-local-sgd")
        ),
    )
}
_AVERAGED = ("torch-averager", "overlap-averager", "overlap-local-sgd")


def predicted_ms(method: Method, profile: Profile, link: Link, costs: Any) -> float:
    if method.name in _AVERAGED:
        # Steps of their own, and one all-reduce of all parameters in eight.
        averaged_ms = link.ms("all_reduce", 2 * profile.gradient_bytes * (link.ranks - 1) / link.ranks)
        return profile.compute_ms + profile.update_ms + (averaged_ms + 2 * profile.copy_ms) / _PERIOD
    layout = cut(profile.parameters, None)
    return step_ms(schedule_of(method, layout, profile, link, costs)[0])


def _scaled(profile: Profile, factor: float) -> Profile:
    """The same at another speed of the machine."""
    times = {f: getattr(profile, f) * factor for f in ("forward_ms", "backward_ms", "update_ms", "copy_ms")}
    parameters = tuple(
        dataclasses.replace(one, ready_ms=one.ready_ms * factor, needed_ms=one.needed_ms * factor)
        for one in profile.parameters
    )
    return dataclasses.replace(profile, parameters=parameters, **times)


def rank_task(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    settings = Settings(model=task["model"], ranks=ranks, batch_size=task["batch_size"])
    known = registry()

    def setup(name: str) -> TrainingSetup:
        return TrainingSetup(settings=settings, workload=workload(task["model"]), device=device, group=dist.new_group(),
                             is_simulated=False, optimizer_name=known[name].optimizer_name(settings))  # fmt: skip

    profiles: dict[str, Profile] = {}
    for name in ("ddp-sgd", "ddp-sgd-fused", "ddp-adamw", "ddp-adamw-fused"):
        made = setup(name)
        model = made.model()
        training = Training(model, made.optimizer(model.parameters()), torch.nn.functional.cross_entropy)
        dist.barrier()
        own = measure(training, made._batch, seconds=1.5, threads=thread_rate(ranks))
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, own)
        profiles[made.optimizer_name] = Profile.slowest(found)
    group = dist.new_group()
    link = measure_link(group, device)

    def compute() -> None:
        training.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(training.model(made._batch[0]), made._batch[1]).backward()

    link = measure_sharing(link, group, device, compute)
    # All ranks compress at the same time, as in training.
    costs = measured_costs(ranks, runs=3)
    layout = cut(profiles["sgd"].parameters, None)
    names = [name for name in task["rows"] if name in ROWS]
    for name in names:
        if ROWS[name].reducer is not None:
            costs(ROWS[name], layout)
    loops = {}
    for name in [COMPUTE_ONLY, *names]:
        loops[name] = known[name].build(setup(name))
        with loops[name].block(3):
            for _ in range(3):
                loops[name].step()
            loops[name].finish()
    samples: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    start_s = time.monotonic()
    for number in range(task["rounds"]):
        for name in order.sample(list(loops), len(loops)):
            variant, loop = known[name], loops[name]
            with loop.block(variant.lead_in_steps + variant.block_steps):
                dist.barrier()
                for _ in range(variant.lead_in_steps):
                    loop.step()
                begin_s = time.perf_counter()
                for _ in range(variant.block_steps):
                    loop.step()
                if not variant.lead_in_steps:
                    loop.finish()
                samples[name].append(1e3 * (time.perf_counter() - begin_s) / variant.block_steps)
                loop.finish()
        verdict = torch.tensor(float(number + 1 < _LEAST_ROUNDS or time.monotonic() - start_s < task["seconds"]))
        dist.broadcast(verdict, 0)
        if not verdict.item():
            break
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, samples)
    if rank == 0:
        measured = {
            name: statistics.median(max(times) for times in zip(*(one[name] for one in everyone), strict=True))
            for name in loops
        }
        factor = measured[COMPUTE_ONLY] / profiles["sgd"].compute_ms
        rows = {}
        for name in names:
            profile = profiles[known[name].optimizer_name(settings)]
            at_once = predicted_ms(ROWS[name], profile, link, costs)
            own_factor = measured[COMPUTE_ONLY] / profile.compute_ms
            rows[name] = {
                "predicted_ms": predicted_ms(ROWS[name], _scaled(profile, own_factor), link, costs),
                "unscaled_ms": at_once,
                "measured_ms": measured[name],
            }
        found = {
            "rows": rows,
            "compute_ms": measured[COMPUTE_ONLY],
            "scaled_by": factor,
            "rounds": len(samples[COMPUTE_ONLY]),
            "all_reduce": str(link.all_reduce),
            "messages": str(link.messages),
            "compute_rate": link.compute_rate,
            "send_rate": link.send_rate,
            "delay_ms": link.delay_ms,
            "load": os.getloadavg()[0],
        }
        linked_ranks.answer(task, found)
    dist.barrier()
    dist.destroy_process_group()


def measured(options: argparse.Namespace, model: str, ranks: int, bandwidth: str | None) -> dict[str, Any]:
    """A cell, some rows at a time: each is a model with its optimizer on every rank of this machine."""
    parts = [options.rows[place : place + _AT_A_TIME] for place in range(0, len(options.rows), _AT_A_TIME)]
    found = []
    for rows in parts:
        task = {"model": model, "rows": rows, "rounds": options.rounds, "seconds": options.seconds / len(parts),
                "batch_size": options.batch_size}  # fmt: skip
        found.append(linked_ranks.run(str(_HERE), task, ranks=ranks, bandwidth=bandwidth, timeout_s=_CELL_S))
    rows = {name: row for part in found for name, row in part.pop("rows").items()}
    return {"rows": rows, "load": max(part["load"] for part in found), "parts": found}


def errors(cells: dict[str, Any], key: str = "predicted_ms") -> list[float]:
    return [row[key] / row["measured_ms"] - 1 for cell in cells.values() for row in cell["rows"].values()]


def table(cells: dict[str, Any]) -> str:
    """Rows by cells: measured, and how far off the prediction was."""
    names = [name for name in ROWS if any(name in cell["rows"] for cell in cells.values())]
    lines = [f"| row | {' | '.join(cells)} |", f"| --- |{' ---: |' * len(cells)}"]
    for name in names:
        texts = [
            "-" if (row := cell["rows"].get(name)) is None
            else f"{row['measured_ms']:.1f} ms, {row['predicted_ms'] / row['measured_ms'] - 1:+.0%}"
            for cell in cells.values()
        ]  # fmt: skip
        lines.append(f"| `{name}` | {' | '.join(texts)} |")
    scaled, raw = (statistics.median(map(abs, errors(cells, key))) for key in ("predicted_ms", "unscaled_ms"))
    loads = ", ".join(f"{cell['load']:.1f}" for cell in cells.values())
    told = (
        f"Median error {scaled:.1%} over {len(errors(cells))} predictions ({raw:.1%} with the computation as it was "
        f"measured before, not scaled to `compute-only`). Load of the machine when each was done: {loads}."
    )
    return "\n".join([*lines, "", told])


def main() -> None:
    parser = grid.parser(__doc__, links=["1gbit"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each cell's timing; never less than 3 rounds")
    options = parser.parse_args()
    if options.rank_task:
        rank_task(json.loads(Path(options.rank_task).read_text()))
        return
    cells = grid.measure(
        options,
        RESULTS,
        functools.partial(measured, options),
        lambda cell: f"median error {statistics.median(map(abs, errors({'': cell}))):.1%}",
    )
    grid.write(table(cells), options.into, begin=BEGIN, end=END)


if __name__ == "__main__":
    main()
