"""`make gpu`: all that needs a GPU, within eight minutes, and a report; `--device cpu` is the dry run.

It needs torch and installs nothing. The checks of `tests/gpu` come first; then steps on all GPUs of the machine, by
`benchmarks.gpu_ranks`; and where there is one GPU, steps of two ranks that share it and send through TCP, a slow link.
Each runs in processes of its own, so one that crashes or hangs costs its own section of the report, which is written
after every section.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import in_markdown

__all__ = ["CRASHED", "main"]

_ROOT = Path(__file__).parents[1]
_BUDGET_S = {"cuda": 450.0, "cpu": 120.0}
# Of the time that is left, for the checks and for the steps on all GPUs; then the rest is for two ranks on one.
_SHARES = {"one": (0.35, 0.6), "several": (0.35, 1.0)}
# How long a command may go on after its own limit, which ends no check and no sample that has begun.
_GRACE_S = 30.0
CRASHED = "it ended the processes"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and leaves `report.md` and its parts in a folder; returns 1 if a check or a variant failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=tuple(_BUDGET_S), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("overlap-gpu"), help="of the report")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it")
    parser.add_argument("--rows", default="", metavar="TEXT", help="ways to train whose name contains it")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains it")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; the dry run is: make gpu DEVICE=cpu")
    budget_s = options.budget or _BUDGET_S[options.device]
    options.folder.mkdir(parents=True, exist_ok=True)
    folder: Path = options.folder.resolve()
    until_s = time.monotonic() + budget_s
    ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    checks_share, ranks_share = _SHARES["several" if options.device == "cuda" and ranks > 1 else "one"]
    sections: list[str] = []
    wrong: list[str] = []

    def add(part: Callable[..., tuple[str, list[str]]], share: float, *args: Any) -> None:
        """Runs a part with its share of the time that is left; no error of one ends the others."""
        try:
            section, failures = part(options.device, folder, share * (until_s - time.monotonic()), *args)
        except Exception as error:
            section, failures = f"```\n{traceback.format_exc()}```", [f"{part.__name__}: {error}"]
        sections.append(section)
        wrong.extend(failures)
        (folder / "report.md").write_text("\n\n".join(sections) + "\n")

    add(_machine, 0.0)
    add(_checks, checks_share, options.only)
    add(_ranks, ranks_share, ranks, options.rows)
    if ranks_share < 1:
        add(_ranks, 1.0, 2, options.rows, True)
    print("\n\n".join(sections))
    print(f"\n{folder / 'report.md'}" + "".join(f"\nfailed: {one}" for one in wrong), flush=True)
    return int(bool(wrong))


def _machine(device: str, folder: Path, limit_s: float) -> tuple[str, list[str]]:
    lines = [f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"]
    if device == "cpu":
        return f"# CPU: a dry run in a GPU's place, whose times say nothing\n\n{lines[0]}", []
    one = torch.cuda.get_device_properties(0)
    lines.append(
        f"{torch.cuda.device_count()} x {one.name}, {one.total_memory / 2**30:.0f} GiB, compute capability "
        f"{one.major}.{one.minor}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )
    return f"# {one.name}\n\n" + "\n\n".join(lines), []


def _checks(device: str, folder: Path, limit_s: float, only: str) -> tuple[str, list[str]]:
    """Those of `tests/gpu`: a line a topic, and why each that did not pass did not."""
    argv = ["gpu", "--device", device, "--time-limit", f"{limit_s:.0f}", "--only", only]
    results, failures = _run(argv, folder / "checks.json", limit_s)
    bad = [one for one in results or () if one["outcome"] not in ("passed", "skipped")]
    outcomes = ("passed", "failed", "died", "hung", "skipped")
    rows = [["topic", *outcomes]]
    for topic in dict.fromkeys(one["topic"] for one in results or ()):
        counts = Counter(one["outcome"] for one in results or () if one["topic"] == topic)
        rows.append([topic, *(str(counts[outcome]) for outcome in outcomes)])
    details = [f"`{one['name']}` {one['outcome']}:\n\n```\n{one['detail'].strip()[-2000:]}\n```" for one in bad]
    return "\n\n".join(["## Checks", in_markdown(rows), *details, *failures]), [
        *failures,
        *(one["name"] for one in bad),
    ]


def _ranks(
    device: str, folder: Path, limit_s: float, ranks: int, rows: str, is_slow: bool = False
) -> tuple[str, list[str]]:
    """Steps by `benchmarks.gpu_ranks`, on all GPUs or on a slow link: a table for each model and batch."""
    argv = [
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "benchmarks.gpu_ranks",
        "--device", device, "--time-limit", f"{limit_s:.0f}", "--only", rows, *(["--slow"] if is_slow else []),
    ]  # fmt: skip
    results, failures = _run(argv, folder / ("slow.json" if is_slow else "ranks.json"), limit_s)
    tables: dict[str, list[list[str]]] = {}
    plain: dict[tuple[str, int], float] = {}
    for cell in results or ():
        head = ["MB a bucket", "", "step, ms", "of plain DDP", "host, ms", "launches", "GB"]
        table = tables.setdefault(f"{cell['model']}, batch of {cell['batch']} a rank", [head])
        words = [str(cell["bucket_mb"]), cell["row"]]
        if cell["status"] != "ok":
            table.append([*words, cell["status"], "", "", "", ""])
            continue
        step_ms = cell["step_ms"]
        if cell["row"] == "plain DDP":
            plain.setdefault((cell["model"], cell["batch"]), step_ms)  # With 25 MB it comes first.
        base_ms = plain.get((cell["model"], cell["batch"]), math.nan)
        figures = f"{step_ms:.1f}", f"{step_ms / base_ms:.3f}", f"{cell['host_ms']:.1f}", f"{cell['launches']}"
        table.append([*words, *figures, f"{cell['peak_bytes'] / 1e9:.2f}"])
    texts = [f"**{title}**\n\n{in_markdown(table, left=(1,))}" for title, table in tables.items()]
    failures += [f"ranks: {cell['row']}: {cell['status']}" for cell in results or () if _has_failed(cell)]
    title = "Steps of 2 ranks that share a GPU, NCCL through TCP" if is_slow else f"Steps on {ranks} ranks"
    return "\n\n".join([f"## {title}", *texts, *failures]), failures


def _has_failed(cell: dict[str, Any]) -> bool:
    """PyTorch's own ways refuse this and that; and one may have had no time."""
    is_ours = not cell["row"].startswith(("plain DDP", "DDP, ", "torch ", "FSDP2"))
    return (is_ours or cell["status"] == CRASHED) and cell["status"] not in ("ok", "not run")


def _run(argv: Sequence[str], results: Path, limit_s: float) -> tuple[Any, list[str]]:
    """Runs a module in a process of its own; returns the results that it saved, if any, and what went wrong."""
    log = results.with_suffix(".log")
    results.unlink(missing_ok=True)
    print(f"{results.stem}: up to {limit_s:.0f} s, in {log}", file=sys.stderr, flush=True)
    places = (_ROOT, _ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")]))
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-m", *argv, "--json", str(results)]
    failures = []
    with log.open("wb") as stream:
        try:
            limit_s = max(limit_s, 0.0) + _GRACE_S
            done = subprocess.run(command, env=environ, stdout=stream, stderr=stream, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            failures.append(f"{results.stem} was stopped {_GRACE_S:.0f} s after its time; its output is in {log.name}")
        else:
            # Checks that fail end with 1, and say so in the results.
            if done.returncode > 1 or done.returncode < 0 or not results.exists():
                failures.append(f"{results.stem} left with status {done.returncode}; its output is in {log.name}")
    return json.loads(results.read_text()) if results.exists() else None, failures


if __name__ == "__main__":
    sys.exit(main())
