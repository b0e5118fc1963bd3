"""Memory that training takes beside weights and activations, by the way of updating, as a table in Markdown.

    python -m benchmarks.memory_table [--models resnet18 gpt-25m gpt-100m] [--optimizers sgd adamw] [--ranks 2 4]
        [--rows NAME ...] [--into docs/reports/memory.md]

Each cell is a run of its own, one fresh process for each rank, of a few steps from the first on; the figure is that of
the rank that took most. *Above activations* is the peak of the resident set, less that of a run that makes the same
forward and backward and drops each gradient as it comes: that has the weights and the activations, and nothing else.
Beside it is the median time of a step, with all ranks on this machine's cores and loopback; compare those of one quiet
machine alone.
Figures are kept in ``benchmarks/memory_table.json``, so the table can be measured in parts; with ``--into`` the table
of all that were measured takes the place of the text between two comments there. A new row is an entry of ``ROWS``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import MemoryMeter
from benchmarks.models import WORKLOADS
from benchmarks.pages import in_markdown, write_between
from benchmarks.ranks import RankError, World, open_network, run_on_ranks
from benchmarks.recipes import Maker, Recipe, Update, plain, sharded, stepped, torch_hook_then_optimizer, torch_zero

RESULTS = Path(__file__).resolve().with_suffix(".json")
BEGIN, END = "<!-- peaks: written by benchmarks/memory_table.py -->", "<!-- end of peaks -->"
MIB = 2**20
# The first two allocate buckets and state; the others show the peak of a step in the middle of training.
_STEPS, _FIRST = 5, 2

# Of the workload: title and batch of each rank.
MODELS = {"resnet18": ("ResNet-18, 11.7 M", 2), "gpt-25m": ("GPT, 27 M", 2), "gpt-100m": ("GPT, 98 M", 1)}
OPTIMIZERS = {
    "sgd": ("SGD with momentum", Maker(torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "fused": True})),
    "adamw": ("AdamW", Maker(torch.optim.AdamW, {"lr": 1e-4, "fused": True})),
}


def _compute(module: nn.Module, make: Maker) -> Update:
    """No update: each gradient is dropped as it comes."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return Update()


COMPUTE = "forward and backward alone"
# By name: the title, and the recipe; all but "ddp" have gradients as views of the buckets.
ROWS: dict[str, tuple[str, Recipe]] = {
    COMPUTE: (COMPUTE, _compute),
    "ddp": ("plain DDP", plain),
    "ddp-views": ("plain DDP, `gradient_as_bucket_view=True`", plain),
    "torch-hook": ("PyTorch's `_hook_then_optimizer`, views", torch_hook_then_optimizer),
    "torch-zero": ("PyTorch's `ZeroRedundancyOptimizer`, views", torch_zero),
    "step": ("`Step`, views", stepped()),
    "step-released": ("`Step(release_gradients=True)`", stepped(release_gradients=True)),
    "zero": ("`ZeroStep`, views", sharded()),
    "zero-released": ("`ZeroStep(release_gradients=True)`", sharded(release_gradients=True)),
}

# By model, optimizer, ranks and row, with slashes between: bytes of the weights and of the peaks, and a step's time.
Cells = dict[str, dict[str, float]]


def cell(world: World, row: str, model: str, optimizer: str) -> dict[str, float]:
    """One rank's figures: its peaks in bytes, over all steps and from the third on."""
    for name in ("ddp-views", row):  # Memory of imports and connections is taken before anything is measured.
        module, update = _built(name, nn.Linear(8, 8), optimizer)
        for _ in range(3):
            _step(module, update, torch.ones(2, 8), torch.zeros(2, dtype=torch.long))
        update.finish()
    del module, update
    gc.collect()
    torch.manual_seed(world.rank)
    inputs, target = WORKLOADS[model].make_batch(MODELS[model][1])
    meter = MemoryMeter(world.device)
    torch.manual_seed(0)
    module, update = _built(row, WORKLOADS[model].make_model(), optimizer)
    took_s = []
    whole = 0
    for place in range(_STEPS):
        if place == _FIRST:
            whole = meter.peak_bytes()
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # The recorded peak is the present size.
        start_s = time.perf_counter()
        _step(module, update, inputs, target)
        took_s.append(time.perf_counter() - start_s)
    settled = meter.peak_bytes()
    dist.barrier()
    return {
        "weights": sum(parameter.nbytes for parameter in module.parameters()),
        "peak": max(whole, settled),
        "settled": settled,
        "step_ms": 1e3 * statistics.median(took_s[_FIRST:]),
    }


def _built(row: str, module: nn.Module, optimizer: str) -> tuple[nn.Module, Update]:
    ddp = module if row == COMPUTE else DistributedDataParallel(module, gradient_as_bucket_view=row != "ddp")
    return ddp, ROWS[row][1](ddp, OPTIMIZERS[optimizer][1])  # type: ignore[arg-type]


def _step(module: nn.Module, update: Update, inputs: torch.Tensor, target: torch.Tensor) -> None:
    nn.functional.cross_entropy(module(inputs), target).backward()
    update.step()
    update.clear()


def measure(row: str, model: str, optimizer: str, ranks: int, repeats: int) -> dict[str, float] | None:
    """The median of some runs in fresh processes; ``None`` where the ranks fail."""
    runs = []
    for _ in range(repeats):
        try:
            with open_network(ranks) as network:
                by_rank: list[dict[str, float]] = run_on_ranks(network, cell, row, model, optimizer)
        except RankError as error:
            print(error, file=sys.stderr)
            continue
        runs.append({key: max(one[key] for one in by_rank) for key in by_rank[0]})
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} if runs else None


def table(results: Cells) -> str:
    """All cells, a table for each model and optimizer."""
    worlds = sorted({int(key.split("/")[2]) for key in results})
    tables = []
    for (model, (title, _)), (optimizer, (kind, _)) in itertools.product(MODELS.items(), OPTIMIZERS.items()):
        by_ranks = [_of_ranks(results, model, optimizer, ranks) for ranks in worlds]
        measured = [(ranks, cells) for ranks, cells in zip(worlds, by_ranks, strict=True) if COMPUTE in cells]
        rows = [row for row in ROWS if row != COMPUTE and any(row in cells for _, cells in measured)]
        if not rows:
            continue
        heads = ["rank that takes most"]
        lines = [[ROWS[row][0]] for row in rows]
        for ranks, cells in measured:
            columns = 4 if any("step_ms" in found for found in cells.values()) else 3
            heads += [f"{ranks} ranks", "of plain DDP", "from step 3", "step, ms"][:columns]
            lines = [line + _figures(cells, row)[:columns] for row, line in zip(rows, lines, strict=True)]
        weights = measured[0][1][COMPUTE]["weights"] / MIB
        tables.append(
            f"**{title} parameters ({weights:.0f} MiB), {kind}**, MiB above activations:\n\n"
            f"{in_markdown([heads, *lines])}"
        )
    return "\n\n".join(tables)


def _of_ranks(results: Cells, model: str, optimizer: str, ranks: int) -> Cells:
    keys = {row: f"{model}/{optimizer}/{ranks}/{row}" for row in ROWS}
    return {row: results[key] for row, key in keys.items() if key in results}


def _figures(cells: Mapping[str, Mapping[str, float]], row: str) -> list[str]:
    if row not in cells:
        return ["-"] * 4
    found, compute, plain_ddp = cells[row], cells[COMPUTE], cells.get("ddp")
    above = found["peak"] - compute["peak"]
    return [
        f"{above / MIB:.0f}",
        "-" if plain_ddp is None else f"{above / (plain_ddp['peak'] - compute['peak']):.2f}",
        f"{(found['settled'] - compute['settled']) / MIB:.0f}",
        f"{found['step_ms']:.0f}" if "step_ms" in found else "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--into", type=Path, help="the page to write the table into")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell, of which the median is taken")
    options = parser.parse_args()
    results: Cells = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model, optimizer, ranks, row in itertools.product(
        options.models, options.optimizers, options.ranks, options.rows
    ):
        found = measure(row, model, optimizer, ranks, options.repeats)
        if found is not None:
            key = f"{model}/{optimizer}/{ranks}/{row}"
            results[key] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{key}: peak {found['peak'] / MIB:.0f} MiB, step {found['step_ms']:.0f} ms", flush=True)
    text = table(results)
    print(text)
    if options.into is not None:
        write_between(options.into, BEGIN, END, text)


if __name__ == "__main__":
    main()
