"""What fewer bytes cost in accuracy: the demo's ResNet-18 on handwritten digits, every way from the same weights.

    python -m benchmarks.wire_accuracy [--ranks 2] [--seeds 3] [--epochs 5] [--image-size 32] [--markdown table.md]

Each row trains once per seed with the demo's own loop, data and schedule; `python -m overlap demo` with the options in
the second column trains the same beside plain DDP. Accuracy is that of rank 0's model on the 360 images that were held
out.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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


def rank_main(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    digits = load_digits(image_size=options.image_size, images=Settings().images, device=torch.device("cpu"))
    lines = ["| gradients, update | demo's options | accuracy | of each seed |", "| --- | --- | ---: | ---: |"]
    for name in options.rows or ROWS:
        typed, settings = ROWS[name]
        found = [percent(replace(settings, seed=seed, epochs=options.epochs), digits) for seed in range(options.seeds)]
        each = ", ".join(f"{one:.1f}" for one in found)
        lines.append(f"| {name} | `{typed}` | {statistics.mean(found):.1f} % | {each} |".replace("``", "-"))
        if rank == 0:
            print(lines[-1], flush=True)
    if rank == 0 and options.markdown is not None:
        options.markdown.write_text("\n".join([*lines, ""]))
    dist.destroy_process_group()


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
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29742", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    mp.spawn(rank_main, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
