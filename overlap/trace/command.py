"""The `trace` command: its options, and the ranks it starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from overlap._options import require_extra, whole_number
from overlap.demo.settings import OPTIMIZERS, TRAIN_IMAGES, WIRES, Settings
from overlap.errors import ConfigurationError
from overlap.launch import launched_ranks, run_ranks

__all__ = ["add_arguments", "run"]

_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `overlap trace`."""
    default = Settings()
    add = parser.add_argument
    # Not a default that argparse knows: under torchrun the ranks are what it started.
    add("--ranks", type=whole_number(1, 64), default=argparse.SUPPRESS,
        help=f"processes to start (default: {_RANKS}, or torchrun's)")  # fmt: skip
    add("--output", type=Path, default=Path("overlap-trace"), metavar="DIR",
        help="where step.png and step.json are saved")  # fmt: skip
    add("--steps", type=whole_number(1, 1000), default=8, help="steps to record of each way to train")
    add("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="sgd is with momentum, adamw fused")
    add("--batch-size", type=whole_number(2, TRAIN_IMAGES), default=default.batch_size, help="images on each rank")
    add("--image-size", type=whole_number(8, 224), default=default.image_size, help="side in pixels")
    add("--bf16-gradients", action="store_true", help="gradients travel in bfloat16 in the overlapped step")
    add("--zero", action="store_true", help="the overlapped step shares the optimizer's state and update out")
    add("--powersgd", type=whole_number(1, 64), default=default.powersgd, metavar="RANK",
        help="gradients travel as factors of this rank in the overlapped step")  # fmt: skip
    add("--wire", choices=WIRES, help="how gradients travel in the overlapped step; with --zero also the parameters")
    add("--bandwidth", default=argparse.SUPPRESS, metavar="SPEED",
        help="of each rank's link, e.g. 1gbit; needs root on Linux (default: what the machine has)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default=default.device, help="auto: GPUs if there are enough")


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of them."""
    values = vars(options).copy()
    asked_ranks, bandwidth = values.pop("ranks", None), values.pop("bandwidth", None)
    steps, output = values.pop("steps"), values.pop("output")
    # As many epochs as any number of steps can need.
    settings = Settings(**values, epochs=TRAIN_IMAGES)
    require_extra("demo", "torchvision", "sklearn", "matplotlib")
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output is {str(output)!r}, which is not a folder")
    launched = launched_ranks(asked_ranks)
    ranks = launched or asked_ranks or _RANKS
    settings.steps_per_epoch(ranks)  # Raises where there are too few images.
    if launched:
        from overlap.trace.experiment import run_experiment

        return run_experiment(settings, steps=steps, output=output)
    return _run_on_link(argv, ranks, bandwidth)


def _run_on_link(argv: Sequence[str], ranks: int, bandwidth: str | None) -> int:
    if bandwidth is None:
        return run_ranks(argv, ranks)
    from overlap.bench.link import LinkError, ShapedLink, parse_bandwidth

    bytes_per_s = parse_bandwidth(bandwidth)
    with ExitStack() as stack:
        try:
            link = stack.enter_context(ShapedLink(ranks=ranks, bandwidth_bytes_per_s=bytes_per_s))
        except LinkError as error:
            raise ConfigurationError(f"--bandwidth is {bandwidth}, but {error}: leave it out") from None
        return run_ranks(argv, ranks, prefix=link.prefix, env=link.env)
