"""`python -m benchmarks.bench`: makes the link, starts the ranks on it, and reports what they found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.bench.report import Report, make_report, markdown, save_plot, table
from benchmarks.bench.settings import MODELS, OPTIMIZERS, LinkKind, RunConfig, Settings
from benchmarks.bench.timing import Measurements
from benchmarks.bench.variants import choose, registry
from benchmarks.launch import run_ranks
from benchmarks.link import LinkError, ShapedLink, shared_gpu_env
from benchmarks.measuring import describe_machine
from overlap.errors import ConfigurationError

# How long after the time limit a run is ended that does not end: its timed blocks may be long.
_PATIENCE_S = 300.0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Settings`."""
    default = Settings()
    parser.epilog = f"variants: {', '.join(registry())}"
    parser.add_argument("--ranks", type=int, default=default.ranks, help="processes, each a rank")
    parser.add_argument("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 1gbit; needs root on Linux")
    parser.add_argument("--model", choices=MODELS, default=default.model)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=default.optimizer,
                        help="of the variants whose name does not say")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="of each rank")
    parser.add_argument("--variants", type=_names, default=default.variants, metavar="A,B,...",
                        help="what to run, besides the baselines; all if left out")  # fmt: skip
    parser.add_argument("--steps", type=int, default=default.steps, help="timed samples of each variant")
    parser.add_argument("--warmup-steps", type=int, default=default.warmup_steps)
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="size of DDP's buckets")
    parser.add_argument("--gradient-as-bucket-view", action="store_true", help="DDP's option, for every variant")
    parser.add_argument("--time-limit", type=float, dest="time_limit_s", metavar="SECONDS",
                        default=default.time_limit_s, help="take fewer samples rather than longer")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--simulate", action="store_true", help="one process, and a link that is only computed")
    parser.add_argument("--latency-us", type=float, default=default.latency_us, help="of a simulated collective")
    parser.add_argument("--share-gpu", action="store_true", help="let NCCL's ranks share one GPU, over sockets")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--json", metavar="FILE", help="save the numbers")
    parser.add_argument("--plot", metavar="FILE.png", help="save a picture")
    parser.add_argument("--show", metavar="FILE", help="run nothing: print what an earlier --json FILE holds")
    parser.add_argument("--markdown", metavar="FILE.md", help="save the table for a document")
    # For the ranks that this command starts; not for users.
    parser.add_argument("--run-config", help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or one rank of it; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description="Times variants against PyTorch's own."
    )
    _add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        if options.run_config is not None:
            from benchmarks.bench.rank import run_rank

            return run_rank(options.run_config)
        if options.show is not None:
            return _show(options)
        if options.device == "auto":
            options.device = "cuda" if torch.cuda.is_available() else "cpu"
        return bench(Settings(**{entry.name: getattr(options, entry.name) for entry in fields(Settings)}))
    except ConfigurationError as error:
        parser.error(str(error))


def bench(settings: Settings) -> int:
    """Runs the benchmark, prints and saves what it found, and returns an exit code."""

    deadline = time.time() + settings.time_limit_s
    variants = choose(settings, "gloo" if settings.device == "cpu" else "nccl")
    with tempfile.TemporaryDirectory(prefix="overlap-bench-") as folder, ExitStack() as stack:
        kind, link = open_link(settings, stack)
        config = RunConfig(settings=settings, variants=variants, folder=folder, link=kind, deadline=deadline)
        machine = describe_machine()
        code = run_ranks(
            ["benchmarks.bench", "--run-config", str(config.save())],
            config.processes,
            prefix=None if link is None else link.prefix,
            env=lambda rank: rank_environment(settings, link, rank),
            timeout_s=settings.time_limit_s + _PATIENCE_S,
        )
        if code == 0:
            _publish(make_report(config, Measurements.load(folder), machine), settings)
    return code


def open_link(settings: Settings, stack: ExitStack) -> tuple[LinkKind, ShapedLink | None]:
    """The link that the machine allows, opened in `stack`; says so where it is not the one asked for."""
    alone = settings.device == "cuda" and torch.cuda.device_count() < settings.ranks and not settings.share_gpu
    if settings.simulate or alone:
        if alone and settings.bandwidth_bytes_per_s is None:
            raise ConfigurationError(
                f"ranks={settings.ranks} have {torch.cuda.device_count()} GPU: add --bandwidth to simulate the "
                "link between them, or --share-gpu"
            )
        _say("the link is simulated: one process stands for all ranks")
        return "simulated", None
    speed = settings.bandwidth_bytes_per_s
    if speed is not None:
        try:
            return "namespaces", stack.enter_context(ShapedLink(ranks=settings.ranks, bandwidth_bytes_per_s=speed))
        except LinkError as error:
            _say(f"{error}; measuring without a speed limit instead")
    if settings.device == "cuda" and not settings.share_gpu:
        return "direct", None
    return "loopback", None


def rank_environment(settings: Settings, link: ShapedLink | None, rank: int) -> dict[str, str]:
    if link is not None:
        return link.env(rank)
    if settings.device == "cpu":
        return {"GLOO_SOCKET_IFNAME": "lo"}
    if settings.share_gpu:
        return shared_gpu_env(rank)
    return {}


def _show(options: argparse.Namespace) -> int:

    try:
        report = Report.load(options.show)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"show={options.show!r} is not a report that --json saved: {error}") from None
    _publish(report, Settings(plot=options.plot, markdown=options.markdown))
    return 0


def _publish(report: Report, settings: Settings) -> None:

    print(table(report), flush=True)
    if settings.markdown is not None:
        Path(settings.markdown).write_text(markdown(report))
    if settings.json is not None:
        report.save(settings.json)
    if settings.plot is not None:
        save_plot(report, settings.plot)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
