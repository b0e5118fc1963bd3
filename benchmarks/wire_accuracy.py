"""What fewer bytes cost in accuracy: the demo's ResNet-18 on handwritten digits, every way from the same weights.

    python -m benchmarks.wire_accuracy [--ranks 2] [--seeds 3] [--epochs 5] [--image-size 32] [--markdown table.md]

Each row trains once per seed with the demo's own loop, data and schedule; `python -m overlap demo` with the option in
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
from overlap.demo import (
    Digits,
    Settings,
    accuracy,
    load_digits,
    load_torchvision,
    overlapped,
    plain,
    start_run,
    train,
)  # fmt: skip

# By name: the demo's chain.
ROWS: dict[str, str | None] = {
    "plain DDP": None,
    "int8": "int8",
    "int4, error feedback": "int4",
    "top-k 1 %, error feedback": "topk",
    "PowerSGD 2": "powersgd",
    "ZeRO": "zero",
    "ZeRO int8 / int8": "zero-int8",
    "ZeRO int4 / int8, error feedback": "zero-int4",
    "DiLoCo, every 8 steps": "diloco",
    "DiLoCo int4, error feedback": "diloco-int4",
}


def percent(settings: Settings, digits: Digits, *, is_plain: bool) -> float:
    """Held-out accuracy after one training."""
    torch.manual_seed(settings.seed)
    model = load_torchvision().models.resnet18(num_classes=10)
    run = start_run("run", copy.deepcopy(model), plain if is_plain else overlapped, settings, torch.device("cpu"))
    train([run], digits, settings)
    found = 100 * accuracy(run, digits)
    del run
    return found


def accuracies(world: World, chain: str | None, epochs: int, seeds: int, image_size: int) -> list[float]:
    """Of one row, by seed."""
    settings = Settings(chain=chain or "step", epochs=epochs)
    digits = load_digits(image_size=image_size, images=settings.images, device=world.device)
    found = [percent(replace(settings, seed=seed), digits, is_plain=chain is None) for seed in range(seeds)]
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
    rows = [["gradients, update", "chain of `overlap demo`", "accuracy", "of each seed"]]
    with open_network(options.ranks) as network:
        for name in options.rows or ROWS:
            chain = ROWS[name]
            arguments = chain, options.epochs, options.seeds, options.image_size
            found: list[float] = run_on_ranks(network, accuracies, *arguments)[0]
            each = ", ".join(f"{one:.1f}" for one in found)
            rows.append([name, f"`--chain {chain}`" if chain else "-", f"{statistics.mean(found):.1f} %", each])
            print(" | ".join(rows[-1]), flush=True)
    if options.markdown is not None:
        options.markdown.write_text(in_markdown(rows, left=(0, 1)) + "\n")


if __name__ == "__main__":
    main()
