"""What training takes beside weights and activations, by the way of updating, as a table in Markdown.

    python -m benchmarks.memory_table [--models resnet18 gpt-25m gpt-100m] [--optimizers sgd adamw] [--ranks 2 4]
        [--rows WORD ...] [--into docs/memory.md]

Each cell is a run of its own, one fresh process for each rank, of a few steps from the first on; the figure is that of
the rank that took most. *Above activations* is the peak of the resident set, less that of a run that makes the same
forward and backward and drops each gradient as it comes: that has the weights and the activations, and nothing else.
Beside it is the median time of a step, with all ranks on this machine's cores and loopback; compare those of one quiet
machine alone.
Figures are kept in ``benchmarks/memory_table.json``, so the table can be measured in parts; with ``--into`` the table
of all that were measured takes the place of what is between two comments there. A new row is an entry of ``ROWS``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
RESULTS = _HERE.with_suffix(".json")
BEGIN, END = "<!-- peaks: written by benchmarks/memory_table.py -->", "<!-- end of peaks -->"
MIB = 2**20
# Of which the first two make what is made once.
STEPS = 5
_FIRST = 2
_LR = 1e-4


@dataclass(frozen=True)
class Model:
    """A model of the table, with its batch and its loss."""

    title: str
    workload: Callable[[], Any]
    batch_size: int


def _resnet() -> Any:
    from benchmarks.models import workload

    return workload("resnet18")


def _gpt(layers: int, width: int, vocabulary: int) -> Callable[[], Any]:
    def make() -> Any:
        from benchmarks.models import GPTConfig, gpt_workload

        heads = width // 64
        return gpt_workload(GPTConfig(layers=layers, width=width, heads=heads, vocabulary=vocabulary, tokens=64))

    return make


MODELS = {
    "resnet18": Model("ResNet-18, 11.7 M", _resnet, 2),
    "gpt-25m": Model("GPT, 27 M", _gpt(6, 512, 16384), 2),
    "gpt-100m": Model("GPT, 98 M", _gpt(12, 768, 16384), 1),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "fused": True},
    "adamw": {"fused": True},
}
TITLES = {"sgd": "SGD with momentum", "adamw": "AdamW"}


@dataclass(frozen=True)
class Row:
    """A way of updating: ``build(ddp, cls, options)`` gives what is called after each backward."""

    title: str
    build: Callable[[Any, Any, dict[str, Any]], Callable[[], None]]
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)


_VIEWS = {"gradient_as_bucket_view": True}


def _compute(ddp: Any, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
    def drop(parameter: Any) -> None:
        parameter.grad = None

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return lambda: None


def _plain(ddp: Any, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
    optimizer = cls(ddp.parameters(), lr=_LR, **options)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torch_hook(ddp: Any, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as hooks
    from torch.distributed.optim import as_functional_optim

    known = {key: value for key, value in options.items() if key != "fused"}
    state = hooks._OptimizerHookState(as_functional_optim(cls, lr=_LR, **known))
    ddp.register_comm_hook(None, hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    return ddp.zero_grad  # type: ignore[no-any-return]


def _torch_zero(ddp: Any, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, lr=_LR, **options)

    def step() -> None:
        zero.step()
        zero.zero_grad()

    return step


def _step(**stage: Any) -> Callable[[Any, Any, dict[str, Any]], Callable[[], None]]:
    def build(ddp: Any, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
        from overlap import AllReduce, OverlappedOptimizer, Step, chain

        optimizer = OverlappedOptimizer(cls(ddp.parameters(), lr=_LR, **options))
        chain(AllReduce(), Step(optimizer, **stage)).register(ddp)
        return optimizer.step

    return build


def _zero(**stage: Any) -> Callable[[Any, Any, dict[str, Any]], Callable[[], None]]:
    def build(ddp: Any, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
        from overlap import ZeroRedundancyOptimizer, ZeroStep, chain

        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, lr=_LR, **options)
        chain(ZeroStep(zero, **stage)).register(ddp)
        return zero.step

    return build


COMPUTE = "forward and backward alone"
ROWS: dict[str, Row] = {
    COMPUTE: Row("forward and backward alone", _compute),
    "ddp": Row("plain DDP", _plain),
    "ddp-views": Row("plain DDP, `gradient_as_bucket_view=True`", _plain, _VIEWS),
    "torch-hook": Row("PyTorch's `_hook_then_optimizer`, views", _torch_hook, _VIEWS),
    "torch-zero": Row("PyTorch's `ZeroRedundancyOptimizer`, views", _torch_zero, _VIEWS),
    "step": Row("`Step`, views", _step(), _VIEWS),
    "step-released": Row("`Step(release_gradients=True)`", _step(release_gradients=True), _VIEWS),
    "zero": Row("`ZeroStep`, views", _zero(), _VIEWS),
    "zero-released": Row("`ZeroStep(release_gradients=True)`", _zero(release_gradients=True), _VIEWS),
}


def run_cell(row: str, model: str, optimizer: str) -> None:
    """One rank of one cell; prints its peaks in bytes, over all steps and from the third on."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.measuring import MemoryMeter

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("ddp-views", row):  # What is imported and connected at first use is there before anything is measured.
        tiny = DistributedDataParallel(torch.nn.Linear(8, 8), **ROWS[name].ddp)
        step = _built(ROWS[name], tiny, optimizer)
        for _ in range(3):
            tiny(torch.ones(2, 8)).sum().backward()
            step()
    del tiny, step
    gc.collect()
    chosen, workload = MODELS[model], MODELS[model].workload()
    torch.manual_seed(dist.get_rank())
    inputs, target = workload.make_batch(chosen.batch_size)
    meter = MemoryMeter(torch.device("cpu"))
    torch.manual_seed(0)
    module = workload.make_model()
    weights = sum(parameter.nbytes for parameter in module.parameters())
    one = ROWS[row]
    ddp = module if row == COMPUTE else DistributedDataParallel(module, **one.ddp)
    step = _built(one, ddp, optimizer)
    took_s = []
    for place in range(STEPS):
        if place == _FIRST:
            whole = meter.peak_bytes()
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # The recorded peak is what is resident now.
        start_s = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(ddp(inputs), target)
        loss.backward()
        del loss
        step()
        took_s.append(time.perf_counter() - start_s)
    settled = meter.peak_bytes()
    dist.barrier()
    step_ms = 1e3 * statistics.median(took_s[_FIRST:])
    found = {"weights": weights, "peak": max(whole, settled), "settled": settled, "step_ms": step_ms}
    Path(os.environ["OVERLAP_CELL"], str(dist.get_rank())).write_text(json.dumps(found))
    dist.destroy_process_group()


def _built(row: Row, ddp: Any, optimizer: str) -> Callable[[], None]:
    import torch

    return row.build(ddp, {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer], OPTIMIZERS[optimizer])


def measure(row: str, model: str, optimizer: str, ranks: int) -> dict[str, float] | None:
    """Play one cell in fresh processes; ``None`` where it cannot be played."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        base = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "OVERLAP_CELL": folder,
            "PYTHONPATH": f"{_HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        started = [
            subprocess.Popen(
                [sys.executable, str(_HERE), "--cell", row, model, optimizer],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        ends = [(one.communicate()[1], one.returncode) for one in started]
        if any(code for _, code in ends):
            print(next(text for text, code in ends if code).decode()[-800:], file=sys.stderr)
            return None
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
        return {key: max(one[key] for one in found) for key in found[0]}


def table(results: dict[str, dict[str, float]]) -> str:
    """All that was measured, a table for each model and optimizer."""
    lines: list[str] = []
    worlds = sorted({int(key.split("/")[2]) for key in results})
    for model, chosen in MODELS.items():
        for optimizer in OPTIMIZERS:
            cells = {
                (row, ranks): found
                for row in ROWS
                for ranks in worlds
                if (found := results.get(f"{model}/{optimizer}/{ranks}/{row}")) is not None
            }
            ranks_here = [ranks for ranks in worlds if (COMPUTE, ranks) in cells and len(cells) > 1]
            if not ranks_here:
                continue
            weights = next(iter(cells.values()))["weights"]
            columns = [_Column(cells, ranks) for ranks in ranks_here]
            lines += [
                f"**{chosen.title} parameters ({weights / MIB:.0f} MiB), {TITLES[optimizer]}**, MiB above activations:",
                "",
                "| | " + " | ".join(column.head for column in columns) + " |",
                "| --- " + "| --: " * sum(column.width for column in columns) + "|",
            ]
            for row, one in ROWS.items():
                if row != COMPUTE and any((row, ranks) in cells for ranks in ranks_here):
                    lines.append(f"| {one.title} | " + " | ".join(column.of(row) for column in columns) + " |")
            lines.append("")
    return "\n".join(lines)


class _Column:
    """What was measured with so many ranks; with times where there are any."""

    def __init__(self, cells: dict[tuple[str, int], dict[str, float]], ranks: int) -> None:
        self._found = {row: found for (row, each), found in cells.items() if each == ranks}
        self._is_timed = any("step_ms" in found for found in self._found.values())
        self.head = f"{ranks} ranks | of plain DDP | from step 3" + " | step, ms" * self._is_timed
        self.width = 3 + self._is_timed

    def of(self, row: str) -> str:
        found, compute, plain = self._found.get(row), self._found[COMPUTE], self._found.get("ddp")
        if found is None:
            return " | ".join("-" * self.width)
        above = found["peak"] - compute["peak"]
        ratio = f"{above / (plain['peak'] - compute['peak']):.2f}" if plain else "-"
        told = [f"{above / MIB:.0f}", ratio, f"{(found['settled'] - compute['settled']) / MIB:.0f}"]
        if self._is_timed:
            told.append(f"{found['step_ms']:.0f}" if "step_ms" in found else "-")
        return " | ".join(told)


def _told(found: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.0f}" if name == "step_ms" else f"{name} {value / MIB:.0f}" for name, value in found.items()
    )


def write(page: Path, text: str) -> None:
    """Put the table between the two comments of ``page``."""
    before, begin, rest = page.read_text().partition(BEGIN)
    assert begin and END in rest, f"{page} has no {BEGIN} ... {END}"
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--into", type=Path, help="the page to write the table into")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell, of which the median is taken")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        run_cell(*options.cell)
        return
    results: dict[str, dict[str, float]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model in options.models:
        for optimizer in options.optimizers:
            for ranks in options.ranks:
                for row in [row for row in options.rows if optimizer in ROWS[row].optimizers]:
                    runs = [measure(row, model, optimizer, ranks) for _ in range(options.repeats)]
                    key, done = f"{model}/{optimizer}/{ranks}/{row}", [run for run in runs if run is not None]
                    if done:
                        results[key] = {name: statistics.median(run[name] for run in done) for name in done[0]}
                        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                    print(key, _told(results.get(key, {})), flush=True)
    text = table(results)
    print(text)
    if options.into is not None:
        write(options.into, text)


if __name__ == "__main__":
    main()
