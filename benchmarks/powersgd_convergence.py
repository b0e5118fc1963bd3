"""Whether compression from the first iteration on costs accuracy: handwritten digits, a small convolutional net.

    python benchmarks/powersgd_convergence.py [--ranks 4] [--epochs 8] [--lr 0.02] [--seeds 3]

Every variant trains from the same weights on the same batches, by plain SGD with momentum; the mean and the range over
seeds of the accuracy on held-out digits are printed.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap

VARIANTS: dict[str, dict[str, Any] | None] = {
    "all-reduce": None,
    "rank 2": {"rank": 2},
    "rank 1": {"rank": 1},
    "rank 2, alternate": {"rank": 2, "alternate": True},
    "rank 2, bf16 residuals": {"rank": 2, "error_dtype": torch.bfloat16},
    "rank 2, no warm start": {"rank": 2, "warm_start": False},
    "rank 2, no error feedback": {"rank": 2, "error_feedback": False},
    "rank 1, no error feedback": {"rank": 1, "error_feedback": False},
}
BATCH_SIZE = 16


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1300], order[1300:]
    return x[train], y[train], x[test], y[test]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy(options: dict[str, Any] | None, seed: int, epochs: int, lr: float) -> tuple[float, float]:
    """Held-out accuracy in percent, and how many times less was sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    x, y, test_x, test_y = data()
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.05)
    stage = overlap.AllReduce() if options is None else overlap.PowerSGD(**options)
    overlap.register(ddp, stage)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x) - ranks * BATCH_SIZE + 1, ranks * BATCH_SIZE):
            mine = order[start + rank * BATCH_SIZE :][:BATCH_SIZE]
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        right = (ddp.module(test_x).argmax(1) == test_y).float().mean()
    return 100 * float(right), stage.compression_stats()[0] if isinstance(stage, overlap.PowerSGD) else 1.0


def run(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    for name, variant in VARIANTS.items():
        found = [accuracy(variant, seed, options.epochs, options.lr) for seed in range(options.seeds)]
        if rank == 0:
            percents = [percent for percent, _ in found]
            mean = sum(percents) / len(percents)
            print(
                f"{name:28} {mean:5.1f} %  ({min(percents):.1f} to {max(percents):.1f})  {found[0][1]:5.1f} x less",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29741", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    mp.spawn(run, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
