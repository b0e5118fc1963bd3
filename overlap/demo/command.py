"""The `demo` command: its options, and the ranks that it starts."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from overlap._checks import require_extra
from overlap.demo.settings import CHAINS, OPTIMIZERS, TRAIN_IMAGES, Settings
from overlap.errors import ConfigurationError

__all__ = ["add_arguments", "run"]

_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `overlap demo`."""
    default, suppress = Settings(), argparse.SUPPRESS
    chains = "; ".join(f"{name}: {words}" for name, words in CHAINS.items()).replace("%", "%%")
    add = parser.add_argument
    # No default that argparse knows: under torchrun the ranks are those that it started.
    add("--ranks", type=_whole_number(1, 64), default=suppress,
        help=f"processes to start (default: {_RANKS}, or torchrun's)")  # fmt: skip
    add("--chain", choices=tuple(CHAINS), default=default.chain, help=chains)
    add("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="sgd is with momentum, adamw fused")
    add("--epochs", type=_whole_number(1, 1000), default=default.epochs,
        help="passes over the training images; powersgd with adamw needs 10, since gradients arrive late")  # fmt: skip
    add("--batch-size", type=_whole_number(2, TRAIN_IMAGES), default=default.batch_size, help="images on each rank")
    add("--seed", type=_whole_number(0, 2**31), default=default.seed, help="of the weights and the images' order")
    add("--uneven", action="store_true", help="ranks get different numbers of batches, under Join")
    add("--images", type=_whole_number(2, TRAIN_IMAGES), default=default.images, help="training images to use")
    add("--image-size", type=_whole_number(8, 224), default=default.image_size, help="side in pixels")
    add("--device", choices=("auto", "cpu", "cuda"), default=default.device, help="auto: GPUs if there are enough")
    add("--output", type=Path, default=default.output, metavar="DIR", help="where loss.png is saved")
    add("--json", type=Path, default=suppress, metavar="FILE", help="also save the results as JSON")


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return parse


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of them: returns 0 if the two runs agree as far as they must."""
    values = vars(options).copy()
    asked = values.pop("ranks", None)
    settings = Settings(**values)
    require_extra("demo", "torchvision", "sklearn", "matplotlib")
    launched = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
    if launched and asked not in (None, launched):
        raise ConfigurationError(f"--ranks is {asked}, but the launcher started {launched}: leave it out")
    ranks = launched or asked or _RANKS
    settings.steps_per_epoch(ranks)  # Raises where there are too few images.
    if launched:
        # Imported by the ranks alone: the process that starts them needs no model.
        from overlap.demo.experiment import run_experiment

        return run_experiment(settings)
    _check_machine(settings, ranks)
    return _start(argv, ranks)


def _start(argv: Sequence[str], ranks: int) -> int:
    """Runs `python -m overlap *argv` once per rank, as torchrun does; returns the exit code of the first that fails."""
    print(f"Starting {ranks} ranks on this machine; the first step comes some seconds later.", flush=True)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks share the cores: with the default of one thread per core each, they would compete for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id=uuid.uuid4().hex,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "overlap", *argv)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return abs(failure.exitcode)
    return 0


def _check_machine(settings: Settings, ranks: int) -> None:
    """Finds out before the training what would otherwise fail after it."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device is cuda, and torch sees no GPU: give cpu or auto")
    if settings.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigurationError(
            f"--device is cuda, and torch sees {torch.cuda.device_count()} GPUs for {ranks} ranks: give --ranks "
            f"{torch.cuda.device_count()}, or --device cpu"
        )
    if settings.json is not None and settings.json.is_dir():
        raise ConfigurationError(f"--json is {settings.json}, a folder: give a file")
    for folder in (settings.output, *([settings.json.parent] if settings.json else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot make the folder {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise ConfigurationError(f"cannot write to the folder {folder}: give another")
