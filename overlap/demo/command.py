"""The `demo` command: its options, and the ranks it starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from overlap._options import require_extra, whole_number
from overlap.demo.settings import OPTIMIZERS, TRAIN_IMAGES, WIRES, Settings
from overlap.errors import ConfigurationError
from overlap.launch import launched_ranks, run_ranks

__all__ = ["add_arguments", "run"]

_RANKS = 2
# What factors leave out of a gradient reaches the weights some steps later, where AdamW's averages go on with it: in 5
# epochs of 22 steps that still shows. SGD goes without momentum.
_POWERSGD_ADAMW_EPOCHS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `overlap demo`."""
    default = Settings()
    add = parser.add_argument
    # Not a default that argparse knows: under torchrun the ranks are what it started.
    suppress = argparse.SUPPRESS
    add(
        "--ranks",
        type=whole_number(1, 64),
        default=suppress,
        help=f"processes to start (default: {_RANKS}, or torchrun's)",
    )
    add("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="sgd is with momentum, adamw fused")
    add(
        "--epochs",
        type=whole_number(1, 1000),
        default=suppress,
        help=f"passes over the training images (default: {default.epochs}; "
        f"{_POWERSGD_ADAMW_EPOCHS} with --powersgd and adamw, since gradients arrive late)",
    )
    add("--batch-size", type=whole_number(2, TRAIN_IMAGES), default=default.batch_size, help="images on each rank")
    add("--seed", type=whole_number(0, 2**31), default=default.seed, help="of the weights and the images' order")
    add("--bf16-gradients", action="store_true", help="gradients travel in bfloat16; compared by accuracy")
    add("--zero", action="store_true", help="the optimizer's state and the update are shared out among the ranks")
    add(
        "--powersgd",
        type=whole_number(1, 64),
        default=default.powersgd,
        metavar="RANK",
        help="gradients travel as factors of this rank, from the first step on, and sgd is without momentum, at a "
        "learning rate of 0.1; compared by accuracy",
    )
    add(
        "--wire",
        choices=WIRES,
        help="how gradients travel; with --zero also the parameters, with --local-sgd the averages instead",
    )
    add(
        "--local-sgd",
        type=whole_number(1, 1000),
        default=default.local_sgd,
        metavar="PERIOD",
        help="after the first epoch average parameters every PERIOD steps; compared by accuracy",
    )
    add("--diloco", action="store_true", help="with --local-sgd: an outer optimizer steps with what a round changed")
    add("--uneven", action="store_true", help="ranks get different numbers of batches, under Join")
    add("--images", type=whole_number(2, TRAIN_IMAGES), default=default.images, help="training images to use")
    add("--image-size", type=whole_number(8, 224), default=default.image_size, help="side in pixels")
    add("--device", choices=("auto", "cpu", "cuda"), default=default.device, help="auto: GPUs if there are enough")
    add("--output", type=Path, default=default.output, metavar="DIR", help="where loss.png is saved")
    add("--json", type=Path, default=suppress, metavar="FILE", help="also save the results as JSON")


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of them: returns 0 if the two runs agree as far as they must."""
    values = vars(options).copy()
    asked_ranks = values.pop("ranks", None)
    if values["powersgd"] is not None and values["optimizer"] == "adamw":
        values.setdefault("epochs", _POWERSGD_ADAMW_EPOCHS)
    settings = Settings(**values)
    require_extra("demo", "torchvision", "sklearn", "matplotlib")
    launched = launched_ranks(asked_ranks)
    ranks = launched or asked_ranks or _RANKS
    settings.steps_per_epoch(ranks)  # Raises where there are too few images.
    if launched:
        # Imported by the ranks alone: the process that starts them needs no model.
        from overlap.demo.experiment import run_experiment

        return run_experiment(settings)
    _check_machine(settings)
    return run_ranks(argv, ranks)


def _check_machine(settings: Settings) -> None:
    """Finds out before the training what would otherwise fail after it."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device is cuda, and torch sees no GPU: give cpu or auto")
    if settings.json is not None and settings.json.is_dir():
        raise ConfigurationError(f"--json is {settings.json}, a folder: give a file")
    for folder in (settings.output, *([settings.json.parent] if settings.json else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot make the folder {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise ConfigurationError(f"cannot write to the folder {folder}: give another")
