"""`python -m benchmarks.bench`: measures, prints a table, and saves it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bench.report import Report, markdown, table
from benchmarks.bench.run import bench
from benchmarks.bench.variants import OPTIMIZERS, registry
from benchmarks.models import WORKLOADS
from overlap.errors import ConfigurationError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints and saves its results, and returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench",
        description="Times variants against PyTorch's own.",
        epilog=f"variants: {', '.join(registry())}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes, each a rank")
    add("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 1gbit; needs root on Linux")
    add("--model", choices=tuple(WORKLOADS), default="resnet18")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="of the variants whose name does not say")
    add("--batch-size", type=int, default=8, help="of each rank")
    add("--variants", type=_names, default=(), metavar="A,B,...", help="besides the baselines; all if left out")
    add("--steps", type=int, default=20, help="timed samples of each variant")
    add("--warmup-steps", type=int, default=3, help="before them, three at least")
    add("--bucket-cap-mb", type=float, metavar="MB", help="size of DDP's buckets")
    add("--gradient-as-bucket-view", action="store_true", help="DDP's option, for every variant")
    add("--time-limit", type=float, dest="time_limit_s", metavar="SECONDS", default=420.0,
        help="for the whole run: takes fewer samples rather than longer")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="save the numbers")
    add("--show", type=Path, metavar="FILE", help="run nothing: print an earlier --json FILE")
    add("--markdown", type=Path, metavar="FILE.md", help="save the table for a document")
    settings = parser.parse_args(argv)
    # DDP rebuilds its buckets after the first step, and PyTorch's PowerSGD starts at the third.
    if settings.ranks < 2 or settings.warmup_steps < 3:
        parser.error("--ranks are at least 2, and --warmup-steps at least 3")
    try:
        report = bench(settings) if settings.show is None else Report.load(settings.show)
    except ConfigurationError as error:
        parser.error(str(error))
    print(table(report), flush=True)
    if settings.markdown is not None:
        settings.markdown.write_text(markdown(report))
    if settings.json is not None:
        report.save(settings.json)
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
