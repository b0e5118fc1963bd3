"""`make gpu`: all that needs a GPU, within eight minutes, and a report; `--device cpu` is the dry run.

It needs torch and installs nothing. The checks of `tests/gpu` come first, then steps beside PyTorch's own ways on a
simulated link: one process stands for all ranks. Each runs in processes of its own, so one that crashes or hangs costs
its own section of the report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_BUDGET_S = {"cuda": 450.0, "cpu": 120.0}
# Of the time, for the checks; the rest is for the steps.
_CHECKS_SHARE = 0.55
# How long a command may go on after its own limit, which ends no check and no sample that has begun.
_GRACE_S = 30.0
_VARIANTS = (
    "overlap-step-adamw", "overlap-step-adamw-deferred", "torch-hook-then-optimizer-adamw", "torch-zero-adamw",
    "overlap-zero-adamw", "overlap-zero-adamw-gather-forward", "torch-fp16-adamw", "overlap-bf16",
    "torch-powersgd-r4", "overlap-powersgd-r4", "overlap-quantize8", "overlap-quantize4-feedback",
)  # fmt: skip
# Model, batch of each rank, bandwidth of each rank's link.
_STEPS = {
    "cuda": (("resnet50-224", 128, "100gbit"), ("gpt-350m", 8, "100gbit"), ("gpt-350m", 8, "25gbit")),
    "cpu": (("mlp", 4, "1gbit"),),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and leaves `report.md` and its parts in a folder; returns 1 if a check or a variant failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=tuple(_BUDGET_S), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("overlap-gpu"), help="of the report")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it")
    parser.add_argument("--variants", default=",".join(_VARIANTS), metavar="A,B,...", help="whose steps are timed")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains it")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; the dry run is: make gpu DEVICE=cpu")
    budget_s = options.budget or _BUDGET_S[options.device]
    options.folder.mkdir(parents=True, exist_ok=True)
    folder: Path = options.folder.resolve()
    until_s = time.monotonic() + budget_s
    sections = [_machine(options.device)]
    wrong = []

    def add(section: str, failures: list[str]) -> None:
        sections.append(section)
        wrong.extend(failures)
        # After each section: what ends this process leaves the others.
        (folder / "report.md").write_text("\n\n".join(sections) + "\n")

    add(*_checks(options.device, folder, _CHECKS_SHARE * budget_s, options.only))
    models = _STEPS[options.device]
    for place, model in enumerate(models):
        left_s = (until_s - time.monotonic()) / (len(models) - place)
        add(*_steps(options.device, folder, *model, options.variants, limit_s=left_s))
    print("\n\n".join(sections))
    print(f"\n{folder / 'report.md'}" + "".join(f"\nfailed: {one}" for one in wrong), flush=True)
    return int(bool(wrong))


def _machine(device: str) -> str:
    lines = [f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"]
    if device == "cpu":
        return f"# CPU: a dry run in a GPU's place, whose times say nothing\n\n{lines[0]}"
    one = torch.cuda.get_device_properties(0)
    lines.append(
        f"{torch.cuda.device_count()} x {one.name}, {one.total_memory / 2**30:.0f} GiB, compute capability "
        f"{one.major}.{one.minor}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )
    return f"# {one.name}\n\n" + "\n\n".join(lines)


def _checks(device: str, folder: Path, limit_s: float, only: str) -> tuple[str, list[str]]:
    """Those of `tests/gpu`: a line a topic, and why each that did not pass did not."""
    found = folder / "checks.json"
    argv = ["gpu", "--device", device, "--time-limit", f"{limit_s:.0f}", "--json", str(found), "--only", only]
    failure = _run(argv, folder / "checks.log", limit_s)
    results: list[dict[str, Any]] = json.loads(found.read_text()) if found.exists() else []
    bad = [one for one in results if one["outcome"] not in ("passed", "skipped")]
    lines = ["## Checks", "", "| topic | passed | failed | died | hung | skipped |", "| --- |" + " ---: |" * 5]
    for topic in dict.fromkeys(one["topic"] for one in results):
        counts = Counter(one["outcome"] for one in results if one["topic"] == topic)
        cells = " | ".join(str(counts[name]) for name in ("passed", "failed", "died", "hung", "skipped"))
        lines.append(f"| {topic} | {cells} |")
    lines += [f"\n`{one['name']}` {one['outcome']}:\n\n```\n{one['detail'].strip()[-2000:]}\n```" for one in bad]
    return "\n".join([*lines, failure]), [one["name"] for one in bad] + ([failure] if failure else [])


def _steps(
    device: str, folder: Path, model: str, batch_size: int, bandwidth: str, variants: str, *, limit_s: float
) -> tuple[str, list[str]]:
    """Step times on a simulated link, by `benchmarks.bench`; one of ours that did not run is a failure."""
    name = f"{model}-{bandwidth}"
    argv = [
        "benchmarks.bench", "--device", device, "--simulate", "--ranks", "8", "--bandwidth", bandwidth,
        "--model", model, "--batch-size", str(batch_size), "--optimizer", "adamw-fused", "--gradient-as-bucket-view",
        "--steps", "20" if device == "cuda" else "3", "--time-limit", f"{max(limit_s, 30.0):.0f}",
        "--variants", variants,
        "--json", str(folder / f"{name}.json"), "--markdown", str(folder / f"{name}.md"),
    ]  # fmt: skip
    failure = _run(argv, folder / f"{name}.log", limit_s)
    table = folder / f"{name}.md"
    text = f"## {model}, 8 simulated ranks, {bandwidth}\n\n{table.read_text().strip() if table.exists() else failure}"
    rows = json.loads((folder / f"{name}.json").read_text())["rows"] if not failure else []
    ours = [f"{name}: {row['variant']}: {row['status']}" for row in rows if _has_failed(row)]
    return text, [*ours, *([failure] if failure else [])]


def _has_failed(row: dict[str, Any]) -> bool:
    """PyTorch's own ways refuse this and that; and a variant may have had no time."""
    return row["variant"].startswith("overlap-") and not row["status"].startswith(("ok", "not run", "not timed"))


def _run(argv: Sequence[str], log: Path, limit_s: float) -> str:
    """Runs a module in a process of its own; returns what went wrong, or nothing."""
    print(f"{argv[0]}: up to {limit_s:.0f} s, in {log}", file=sys.stderr, flush=True)
    places = (_ROOT, _ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")]))
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    with log.open("wb") as stream:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *argv], env=environ, stdout=stream, stderr=stream, check=False,
                timeout=limit_s + _GRACE_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{argv[0]} was stopped {_GRACE_S:.0f} s after its time; its output is in {log.name}"
    # The checks' own status is in their results.
    return "" if done.returncode in (0, 1) else f"{argv[0]} left with status {done.returncode}; see {log.name}"


if __name__ == "__main__":
    sys.exit(main())
