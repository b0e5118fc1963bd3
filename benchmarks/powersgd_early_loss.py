"""What costs accuracy in a run of few steps with factors of rank 2, and what helps: ResNet-18 on handwritten digits.

    python benchmarks/powersgd_early_loss.py [--seeds 0 1 2] [--image-size 16] [--only "rank 2" ...]

Five epochs of 22 steps of 64 images, as in `overlap demo`, but on one rank, which computes the same approximations; no
bytes are sent. Every variant trains from the same weights on the same batches with a one-cycle schedule. Prints the
accuracy on the test split in percent, of each seed; one image is 0.28 points.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import overlap
from overlap._torchvision import load_torchvision
from overlap.demo.data import load_digits, shard
from overlap.demo.settings import TRAIN_IMAGES

EPOCHS, BATCH_SIZE = 5, 64


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs between two runs."""

    lr: float = 0.02
    momentum: float = 0.9
    powersgd: dict[str, Any] | None = field(default_factory=lambda: {"rank": 2})


VARIANTS = {
    "all-reduce": Variant(powersgd=None),
    "all-reduce, no momentum, lr 0.1": Variant(powersgd=None, momentum=0.0, lr=0.1),
    "rank 2": Variant(),
    "rank 2, no momentum, lr 0.1": Variant(momentum=0.0, lr=0.1),
    "rank 2 after one epoch": Variant(powersgd={"rank": 2, "start_step": 22}),
}


def accuracy(variant: Variant, seed: int, image_size: int) -> float:
    digits = load_digits(image_size=image_size, images=TRAIN_IMAGES, device=torch.device("cpu"))
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(load_torchvision().models.resnet18(num_classes=10))
    sgd = torch.optim.SGD(ddp.parameters(), lr=variant.lr, momentum=variant.momentum, weight_decay=5e-4)
    if variant.powersgd is not None:
        overlap.register(ddp, overlap.PowerSGD(**variant.powersgd))
    steps = EPOCHS * (TRAIN_IMAGES // BATCH_SIZE)
    schedule = OneCycleLR(sgd, max_lr=variant.lr, total_steps=steps + 1, cycle_momentum=False)
    for epoch in range(EPOCHS):
        for images, labels in shard(digits, epoch=epoch, seed=seed, rank=0, ranks=1, batch_size=BATCH_SIZE):
            sgd.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            sgd.step()
            schedule.step()
    ddp.eval()
    with torch.no_grad():
        found = ddp.module(digits.test_images).argmax(dim=1)
    return 100 * float((found == digits.test_labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--only", nargs="*", help="variants to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in options.only or VARIANTS:
        for seed in options.seeds:
            print(f"{name:32} seed {seed}: {accuracy(VARIANTS[name], seed, options.image_size):.1f} %", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
