"""What fewer bytes cost in accuracy: the demo's ResNet-18 on handwritten digits, every way from the same weights.

    python -m benchmarks.wire_accuracy [--ranks 2] [--seeds 3] [--epochs 5] [--image-size 32] [--markdown table.md]

Each row trains once per seed with the demo's own loop, data and schedule; `python -m overlap demo` with the options in
the second column trains the same beside plain DDP. Accuracy is that of rank 0's model on the 360 images that were held
out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.pages import in_markdown
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap.demo.experiment import (
    Digits,
    accuracy,
    load_digits,
    load_torchvision,
    overlapped,
    plain,
    start_run,
    train,
)  # fmt: skip
from overlap.demo.settings import Settings

ROWS: dict[str, tuple[str, Settings]] = {
    "plain DDP": ("", Settings()),
    "int8": ("--wire int8", Settings(wire="int8")),
    "int4, error feedback": ("--wire int4", Settings(wire="int4")),
    "top-k 1 %, error feedback": ("--wire topk", Settings(wire="topk")),
    "PowerSGD 2": ("--powersgd 2", Settings(powersgd=2)),
    "ZeRO": ("--zero", Settings(zero=True)),
    "ZeRO int8 / int8": ("--zero --wire int8", Settings(zero=True, wire="int8")),
    "ZeRO int4 / int8, error feedback": ("--zero --wire int4", Settings(zero=True, wire="int4")),
    "DiLoCo, every 8 steps": ("--local-sgd 8 --diloco", Settings(local_sgd=8, diloco=True)),
    "DiLoCo int4, error feedback": (
        "--local-sgd 8 --diloco --wire int4",
        Settings(local_sgd=8, diloco=True, wire="int4"),
    ),
}


def percent(settings: Settings, digits: Digits) -> float:
    """Held-out accuracy after one training."""
    torch.manual_seed(settings.seed)
    model = load_torchvision().models.resnet18(num_classes=10)
    is_plain = settings == replace(Settings(), seed=settings.seed, epochs=settings.epochs)
    run = start_run("run", copy.deepcopy(model), plain if is_plain else overlapped, settings, torch.device("cpu"))
    train([run], digits, settings)
    found = 100 * accuracy(run, digits)
    del run
    return found


def accuracies(world: World, settings: Settings, seeds: int, image_size: int) -> list[float]:
    """Of one row, by seed."""
    digits = load_digits(image_size=image_size, images=settings.images, device=world.device)
    found = [percent(replace(settings, seed=seed), digits) for seed in range(seeds)]
    world.meet()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--image-size", type=int, default=32, help="side in pixels")
    parser.add_argument(
        "--rows", nargs="*", choices=ROWS, metavar="NAME", help=f"some of: {'; '.join(ROWS)}".replace("%", "%%")
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = [["gradients, update", "demo's options", "accuracy", "of each seed"]]
    with open_network(options.ranks) as network:
        for name in options.rows or ROWS:
            words, settings = ROWS[name]
            arguments = replace(settings, epochs=options.epochs), options.seeds, options.image_size
            found: list[float] = run_on_ranks(network, accuracies, *arguments)[0]
            each = ", ".join(f"{one:.1f}" for one in found)
            rows.append([name, f"`{words}`" if words else "-", f"{statistics.mean(found):.1f} %", each])
            print(" | ".join(rows[-1]), flush=True)
    if options.markdown is not None:
        options.markdown.write_text(in_markdown(rows, left=(0, 1)) + "\n")


if __name__ == "__main__":
    main()
