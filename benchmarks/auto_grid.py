"""What `overlap.auto` chooses, compared with the best choice by hand, over links, models and numbers of ranks.

    python benchmarks/auto_grid.py [--models resnet18 transformer mlp] [--ranks 2 4]
        [--links 100mbit 1gbit 10gbit loopback] [--seconds 40] [--into docs/auto.md]

For each cell `overlap.auto` chooses among exact methods, and is timed. Then what it chose takes turns with every other
exact method, two at a time, with DDP's own buckets and with buckets of 8 MB; the figure of a cell is the largest of
chosen / other, at least 1, by the medians of the same rounds. Links take root.
Each cell is kept in `benchmarks/auto_grid.json`, so the grid can be measured in parts. With `--into` the table takes
the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import grid
import linked_ranks

import overlap
from overlap.bench.workload import workload
from overlap.plan.candidates import METHODS, Candidate
from overlap.plan.copies import Training
from overlap.plan.meeting import Meeting
from overlap.plan.race import Race

_HERE = Path(__file__).resolve()
RESULTS = _HERE.with_suffix(".json")
BEGIN, END = "<!-- grid: written by benchmarks/auto_grid.py -->", "<!-- end of grid -->"
_CELL_S = 1800.0
_AT_A_TIME = 2
_BY_HAND = [
    Candidate(method.name, size) for method in METHODS.values() if method.kind == "exact" for size in (None, 8.0)
]


def rank_task(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    torch.manual_seed(0)
    work = workload(task["model"])
    model = work.make_model()
    torch.manual_seed(1 + dist.get_rank())
    sample = work.make_batch(task["batch_size"])
    loss = torch.nn.functional.cross_entropy

    def trained() -> Training:
        own = copy.deepcopy(model)
        return Training(own, torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True), loss)

    # What the first DDP of a process imports is not part of choosing.
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    mine = trained()
    start_s = time.monotonic()
    ddp, _ = overlap.auto(mine.model, mine.optimizer, sample=sample, loss=loss, allow="sharded", quiet=True)
    took_s = time.monotonic() - start_s
    plan = overlap.Plan.of(ddp)
    del ddp, mine
    found: dict[str, float] = {}
    plain_ratio = 1.0
    others = [one for one in _BY_HAND if one != plan.candidate]
    for place in range(0, len(others), _AT_A_TIME):
        race = Race(Meeting(group, device), group, device, sample, trained, {})
        for one in [plan.candidate, *others[place : place + _AT_A_TIME]]:
            race.add(one)
        samples = race.run(seconds=task["seconds"] * _AT_A_TIME / len(others))
        race.close()
        chosen_ms = samples.pop(plan.candidate)
        for one, times in samples.items():
            found[str(one)] = statistics.median(own / ms for own, ms in zip(chosen_ms, times, strict=True))
            if one.is_plain:
                plain_ratio = found[str(one)]
    if dist.get_rank() == 0:
        best = max(found, key=lambda name: found[name])
        linked_ranks.answer(
            task,
            {
                "chosen": str(plan.candidate),
                "to_best": max(1.0, found[best]),
                "best": best if found[best] > 1 else str(plan.candidate),
                "to_plain": plain_ratio,
                "chose_in_s": took_s,
                "reason": plan.reason,
                "link": plan.link,
                "chosen_to_others": found,
                "load": os.getloadavg()[0],
            },
        )
    dist.barrier()
    dist.destroy_process_group()


def table(cells: dict[str, Any]) -> str:
    heads = ["cell", "chosen", "chosen / best", "best", "chosen / plain DDP", "chose in", "load"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | `{cell['chosen']}` | {cell['to_best']:.3f} | `{cell['best']}` | {cell['to_plain']:.3f} | "
        f"{cell['chose_in_s']:.1f} s | {cell['load']:.1f} |"
        for name, cell in cells.items()
    ]
    good = sum(cell["to_best"] <= 1.02 for cell in cells.values())
    quick = sum(cell["chose_in_s"] < 15 for cell in cells.values())
    told = (
        f"Of {len(cells)} cells {good} are within 1.02 of the best, and in {quick} choosing took less than 15 s. Load: "
        "of the machine when the cell was done."
    )
    return "\n".join([*lines, "", told])


def measured(options: argparse.Namespace, model: str, ranks: int, bandwidth: str | None) -> dict[str, Any]:
    task = {"model": model, "seconds": options.seconds, "batch_size": options.batch_size}
    start_s = time.monotonic()
    cell = linked_ranks.run(str(_HERE), task, ranks=ranks, bandwidth=bandwidth, timeout_s=_CELL_S)
    return {**cell, "took_s": time.monotonic() - start_s}


def main() -> None:
    parser = grid.parser(__doc__, links=["100mbit", "1gbit", "10gbit", "loopback"])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each cell's timing, behind the warm-ups")
    options = parser.parse_args()
    if options.rank_task:
        rank_task(json.loads(Path(options.rank_task).read_text()))
        return
    cells = grid.measure(
        options,
        RESULTS,
        functools.partial(measured, options),
        lambda cell: f"{cell['chosen']}, {cell['to_best']:.3f} of the best ({cell['took_s']:.0f} s)",
    )
    grid.write(table(cells), options.into, begin=BEGIN, end=END)


if __name__ == "__main__":
    main()
