"""What `overlap.auto` chooses, compared with the best choice by hand, over links, models and numbers of ranks.

    python -m benchmarks.auto_grid [--models resnet18 transformer mlp] [--ranks 2 4]
        [--links 100mbit 1gbit 10gbit loopback] [--seconds 40] [--choose-seconds 10]
        [--into docs/auto.md]

For each cell `overlap.auto` chooses among exact methods, and is timed. Then what it chose takes turns with every other
exact method, two at a time, with DDP's own buckets and with buckets of 8 MB. The two that were fastest, relative to
what was chosen in the same rounds, are measured again: the largest of seven ratios with noise would be above 1 even if
all methods were equal. The figure of a cell is the larger of chosen / other of this second measurement, by medians of
ratios, and at least 1. Links take root.
Each cell is kept in `benchmarks/auto_grid.json`, so the grid can be measured in parts. With `--into` the table takes
the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap
from benchmarks.models import WORKLOADS
from benchmarks.pages import in_markdown, write_between
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap.join.board import Agreement
from overlap.plan.candidates import METHODS, Candidate
from overlap.plan.copies import Training
from overlap.plan.decision import FEWEST_ROUNDS
from overlap.plan.race import Race

RESULTS = Path(__file__).resolve().with_suffix(".json")
BEGIN, END = "<!-- grid: written by benchmarks/auto_grid.py -->", "<!-- end of grid -->"
_CELL_S = 1800.0
_AT_A_TIME = 2
_BY_HAND = [
    Candidate(method.name, size) for method in METHODS.values() if method.kind == "exact" for size in (None, 8.0)
]


def cell(world: World, model_name: str, batch_size: int, seconds: float, options: dict[str, Any]) -> dict[str, Any]:
    """Chooses, and times the choice beside all other exact methods."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = WORKLOADS[model_name].make_model()
    torch.manual_seed(1 + world.rank)
    sample = WORKLOADS[model_name].make_batch(batch_size)
    loss = torch.nn.functional.cross_entropy

    def trained() -> Training:
        own = copy.deepcopy(model)
        return Training(own, torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True), loss)

    # What the first DDP of a process imports is not part of choosing.
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    mine = trained()
    start_s = time.monotonic()
    ddp, _ = overlap.auto(mine.model, mine.optimizer, sample=sample, loss=loss, allow="sharded", quiet=True, **options)
    took_s = time.monotonic() - start_s
    plan = overlap.Plan.of(ddp)
    del ddp, mine
    others = [one for one in _BY_HAND if one != plan.candidate]

    def chosen_to(candidates: list[Candidate], seconds: float) -> dict[Candidate, float]:
        agreement = Agreement(group, "race")
        race = Race(agreement, group, world.device, sample, trained, {})
        for one in [plan.candidate, *candidates]:
            race.add(one)
        end_s = time.monotonic() + seconds
        race.run(FEWEST_ROUNDS)
        race.run_for(lambda: agreement.from_rank_0(end_s - time.monotonic()))
        race.close()
        times = race.samples[plan.candidate]
        return {
            one: statistics.median(own / ms for own, ms in zip(times, race.samples[one], strict=True) if own and ms)
            for one in candidates
        }

    share_s = seconds * _AT_A_TIME / (len(others) + _AT_A_TIME)
    found: dict[Candidate, float] = {}
    for place in range(0, len(others), _AT_A_TIME):
        found.update(chosen_to(others[place : place + _AT_A_TIME], share_s))
    # All ranks have the same samples.
    again = chosen_to(sorted(found, key=lambda one: -found[one])[:_AT_A_TIME], share_s)
    world.meet()
    best = max(again, key=lambda one: again[one])
    plain = next((one for one in found if one.is_plain), None)
    return {
        "chosen": str(plan.candidate),
        "to_best": max(1.0, again[best]),
        "best": str(best if again[best] > 1 else plan.candidate),
        "to_plain": 1.0 if plain is None else {**found, **again}[plain],
        "chose_in_s": took_s,
        "reason": plan.reason,
        "link": plan.link,
        "chosen_to_others": {str(one): ratio for one, ratio in found.items()},
        "again": {str(one): ratio for one, ratio in again.items()},
        "load": os.getloadavg()[0],
    }


def table(cells: dict[str, Any]) -> str:
    rows = [["cell", "chosen", "chosen / best", "best", "chosen / plain DDP", "chose in", "load"]]
    rows += [
        [
            name, f"`{cell['chosen']}`", f"{cell['to_best']:.3f}", f"`{cell['best']}`", f"{cell['to_plain']:.3f}",
            f"{cell['chose_in_s']:.1f} s", f"{cell['load']:.1f}",
        ]
        for name, cell in cells.items()
    ]  # fmt: skip
    usual = [cell for name, cell in cells.items() if "seconds=" not in name]
    differs = [
        abs(cell["chosen_to_others"][name] / ratio - 1)
        for cell in cells.values()
        for name, ratio in cell["again"].items()
    ]
    good = sum(cell["to_best"] <= 1.02 for cell in usual)
    quick = sum(cell["chose_in_s"] < 15 for cell in usual)
    summary = (
        f"Of {len(usual)} cells with the default of `seconds` {good} are within 1.02 of the best, and in {quick} "
        "choosing took less than 15 s. What was measured twice differs by "
        f"{statistics.median(differs):.0%} in the median and {max(differs):.0%} at most: so exact are these figures. "
        "Load: of the machine when the cell was done."
    )
    return f"{in_markdown(rows, left=(0, 1, 3))}\n\n{summary}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "transformer", "mlp"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "10gbit", "loopback"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--again", action="store_true", help="measure cells that are there already")
    parser.add_argument("--into", type=Path, help="the page to write the table into")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each cell's timing, behind the warm-ups")
    parser.add_argument(
        "--choose-seconds", type=float, help="`seconds` of `overlap.auto`; such cells are rows of their own"
    )
    options = parser.parse_args()
    choose = {} if options.choose_seconds is None else {"seconds": options.choose_seconds}
    suffix = "" if options.choose_seconds is None else f", seconds={options.choose_seconds:g}"
    cells: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model, link, ranks in itertools.product(options.models, options.links, options.ranks):
        name = f"{model}, {ranks} ranks, {link}{suffix}"
        if name in cells and not options.again:
            continue
        start_s = time.monotonic()
        with open_network(ranks, bandwidth=None if link == "loopback" else link) as network:
            if network.kind == "loopback" and link != "loopback":
                parser.error(f"links of {link} take root on Linux: give --links loopback")
            arguments = model, options.batch_size, options.seconds, choose
            found: dict[str, Any] = run_on_ranks(network, cell, *arguments, limit_s=_CELL_S)[0]
        cells[name] = {**found, "took_s": time.monotonic() - start_s}
        RESULTS.write_text(json.dumps(cells, indent=1) + "\n")
        print(f"{name}: {found['chosen']}, {found['to_best']:.3f} of the best", flush=True)
    text = table(cells)
    print(text)
    if options.into is not None:
        write_between(options.into, BEGIN, END, text)


if __name__ == "__main__":
    main()
