"""`python -m benchmarks.bench`: measures, prints a table, and saves it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.bench.report import Report, markdown, table
from benchmarks.bench.run import bench
from benchmarks.bench.settings import OPTIMIZERS, Settings
from benchmarks.bench.variants import registry
from benchmarks.models import WORKLOADS
from overlap.errors import ConfigurationError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Settings`."""
    default = Settings()
    parser.epilog = f"variants: {', '.join(registry())}"
    parser.add_argument("--ranks", type=int, default=default.ranks, help="processes, each a rank")
    parser.add_argument("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 1gbit; needs root on Linux")
    parser.add_argument("--model", choices=tuple(WORKLOADS), default=default.model)
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default=default.optimizer,
                        help="of the variants whose name does not say")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="of each rank")
    parser.add_argument("--variants", type=_names, default=default.variants, metavar="A,B,...",
                        help="besides the baselines; all if left out")  # fmt: skip
    parser.add_argument("--steps", type=int, default=default.steps, help="timed samples of each variant")
    parser.add_argument("--warmup-steps", type=int, default=default.warmup_steps)
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="size of DDP's buckets")
    parser.add_argument("--gradient-as-bucket-view", action="store_true", help="DDP's option, for every variant")
    parser.add_argument("--time-limit", type=float, dest="time_limit_s", metavar="SECONDS",
                        default=default.time_limit_s, help="take fewer samples rather than longer")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--json", metavar="FILE", help="save the numbers")
    parser.add_argument("--show", metavar="FILE", help="run nothing: print an earlier --json FILE")
    parser.add_argument("--markdown", metavar="FILE.md", help="save the table for a document")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints and saves its results, and returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description="Times variants against PyTorch's own."
    )
    _add_arguments(parser)
    options = parser.parse_args(argv)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        settings = Settings(**{entry.name: getattr(options, entry.name) for entry in fields(Settings)})
        report = bench(settings) if options.show is None else _load(options.show)
    except ConfigurationError as error:
        parser.error(str(error))
    print(table(report), flush=True)
    if settings.markdown is not None:
        Path(settings.markdown).write_text(markdown(report))
    if settings.json is not None:
        report.save(settings.json)
    return 0


def _load(path: str) -> Report:
    try:
        return Report.load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"show={path!r} is not a report that --json saved: {error}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
