"""The choice of `overlap.auto`, compared with every exact chain by hand, over links, models and numbers of ranks.

    python -m benchmarks.auto_grid [--models resnet18 transformer mlp] [--ranks 2 4]
        [--links 100mbit 1gbit 10gbit loopback] [--seconds 40] [--into docs/auto.md]

The goals: at most 1.02 of the best chain by hand in 22 of 24 cells, and never more than 1.02 of plain DDP.

In each cell `overlap.auto` chooses among exact methods, and is timed. Then every other exact method races beside the
choice, in rounds as in `overlap.plan.race`. The two that were fastest, and plain DDP, race once more, and the figures
are of that second race: the largest of several ratios with noise would be above 1 even if all were equal. A ratio is
chosen / other: the median of the rounds, with its quartiles.

Links take root. Each cell is kept in `benchmarks/auto_grid.json`, so the grid can be measured in parts; `--into` puts
the table between two comments of a page.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap
from benchmarks.models import WORKLOADS
from benchmarks.pages import in_markdown, write_between
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap.plan.candidates import PLAIN, allowed
from overlap.plan.choice import quartiles
from overlap.plan.race import FEWEST_ROUNDS, Race, Training
from overlap.ranks.board import Agreement

RESULTS = Path(__file__).resolve().with_suffix(".json")
BEGIN, END = "<!-- grid: written by benchmarks/auto_grid.py -->", "<!-- end of grid -->"
_CELL_S = 1800.0
_GOAL, _GOAL_CELLS = 1.02, "22 of 24"


def cell(world: World, model_name: str, batch_size: int, seconds: float) -> dict[str, Any]:
    """Choose, and race all others beside the choice."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = WORKLOADS[model_name].make_model()
    torch.manual_seed(1 + world.rank)
    sample = WORKLOADS[model_name].make_batch(batch_size)
    loss = torch.nn.functional.cross_entropy

    def training() -> Training:
        own = copy.deepcopy(model)
        return Training(own, torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True), loss)

    # Imports of the first DDP of a process are not part of choosing.
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    mine = training()
    start_s = time.monotonic()
    ddp, _ = overlap.auto(mine.model, mine.optimizer, sample=sample, loss=loss, allow="sharded", quiet=True)
    took_s = time.monotonic() - start_s
    plan = overlap.Plan.of(ddp)
    del ddp, mine

    def raced(others: list[str], share_s: float) -> dict[str, list[float]]:
        """Chosen / other, by quartiles."""
        with (
            Agreement(group, "race") as agreement,
            Race(agreement, group, training, sample, ddp_options={}, baseline=plan.method) as race,
        ):
            for one in others:
                race.compare(one, until_s=time.monotonic() + share_s, least=FEWEST_ROUNDS)
        return {one: quartiles([1 / ratio for ratio in ratios]) for one, ratios in race.ratios.items()}

    others = [one for one in allowed("sharded", "backward") if one != plan.method]
    share_s = seconds / (len(others) + 3)
    first = raced(others, share_s)
    fastest = sorted(first, key=lambda one: -first[one][1])[:2]
    second = raced(list({*fastest, PLAIN} - {plan.method}), share_s)
    best = max(second, key=lambda one: second[one][1])
    return {
        "chosen": plan.method,
        "reason": plan.reason,
        "best": best if second[best][1] > 1 else plan.method,
        "to_best": second[best] if second[best][1] > 1 else [1.0] * 3,
        "to_plain": second.get(PLAIN, [1.0] * 3),
        "first": first,
        "second": second,
        "chose_in_s": took_s,
        "load": os.getloadavg()[0],
    }


def table(cells: dict[str, Any]) -> str:
    rows = [["cell", "chosen", "chosen / best", "best", "chosen / plain DDP", "chose in", "load"]]
    rows += [
        [
            name, f"`{cell['chosen']}`", _shown(cell["to_best"]), f"`{cell['best']}`", _shown(cell["to_plain"]),
            f"{cell['chose_in_s']:.1f} s", f"{cell['load']:.1f}",
        ]
        for name, cell in cells.items()
    ]  # fmt: skip
    good = sum(cell["to_best"][1] <= _GOAL for cell in cells.values())
    slower = sum(cell["to_plain"][1] > _GOAL for cell in cells.values())
    return (
        f"{in_markdown(rows, left=(0, 1, 3))}\n\n"
        f"Of {len(cells)} cells {good} are within {_GOAL} of the best (the goal: {_GOAL_CELLS}), and {slower} take more"
        f" than {_GOAL} of plain DDP (the goal: none). Medians, with quartiles; load: of the machine after the cell."
    )


def _shown(ratio: list[float]) -> str:
    return f"{ratio[1]:.3f} ({ratio[0]:.3f} to {ratio[2]:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "transformer", "mlp"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "10gbit", "loopback"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--again", action="store_true", help="measure cells that are there already")
    parser.add_argument("--into", type=Path, help="the page to write the table into")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each cell's timing, behind the choice")
    options = parser.parse_args()
    cells: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model, link, ranks in itertools.product(options.models, options.links, options.ranks):
        name = f"{model}, {ranks} ranks, {link}"
        if name in cells and not options.again:
            continue
        with open_network(ranks, bandwidth=None if link == "loopback" else link) as network:
            if network.kind == "loopback" and link != "loopback":
                parser.error(f"links of {link} take root on Linux: give --links loopback")
            arguments = model, options.batch_size, options.seconds
            cells[name] = run_on_ranks(network, cell, *arguments, limit_s=_CELL_S)[0]
        RESULTS.write_text(json.dumps(cells, indent=1) + "\n")
        print(f"{name}: {cells[name]['chosen']}, {_shown(cells[name]['to_best'])} of the best", flush=True)
    text = table(cells)
    print(text)
    if options.into is not None:
        write_between(options.into, BEGIN, END, text)


if __name__ == "__main__":
    main()
