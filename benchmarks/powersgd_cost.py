"""What PowerSGD costs a training step besides sending: ResNet-18, ranks on loopback, against compute alone.

    python benchmarks/powersgd_cost.py [--ranks 2] [--rank 4] [--steps 12]

Variants take turns within one run, a step each, so a busy machine slows all of them alike; medians are
printed. On loopback sending is cheap, so what is above compute alone is the time that compressing takes from
the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import overlap
from overlap._torchvision import load_torchvision


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = load_torchvision().models.resnet18(num_classes=10)
    return model


def variants(rank: int) -> dict[str, overlap.Stage | None]:
    return {
        "compute": None,
        "all-reduce": overlap.AllReduce(),
        f"powersgd-{rank}": overlap.PowerSGD(rank=rank),
        f"powersgd-{rank}, alternate": overlap.PowerSGD(rank=rank, alternate=True),
    }


def run(own_rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=own_rank, world_size=options.ranks)
    x, y = torch.randn(options.batch_size, 3, 64, 64), torch.randint(0, 10, (options.batch_size,))
    steps: dict[str, Callable[[], None]] = {}
    stages: dict[str, Any] = {}
    for name, stage in variants(options.rank).items():
        if options.only and name not in options.only:
            continue
        ddp = DistributedDataParallel(build())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if stage is not None:
            overlap.register(ddp, stage)
            stages[name] = stage
        steps[name] = _step(ddp, optimizer, x, y, sync=stage is not None)
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    cpu_ms: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.warmup_steps + options.steps):
        for name, step in steps.items():
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            step()
            if number >= options.warmup_steps:
                times_ms[name].append(1e3 * (time.perf_counter() - start_s))
                cpu_ms[name].append(1e3 * (time.process_time() - start_cpu_s))
    if own_rank == 0:
        for what, measured_ms in (("step", times_ms), ("CPU time", cpu_ms)):
            base_ms = statistics.median(measured_ms["compute"])
            for name, found_ms in measured_ms.items():
                median_ms = statistics.median(found_ms)
                ratio, least_ms = median_ms / base_ms, min(found_ms)
                print(f"{what:9} {name:24} {median_ms:8.1f} ms  {ratio:5.2f} x compute  (least {least_ms:.1f})")
        for name, stage in stages.items():
            if options.layouts and isinstance(stage, overlap.PowerSGD):
                print(name, stage.signature, sep="\n")
    dist.destroy_process_group()


def _step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    sync: bool,
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        if sync:
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
        else:
            with ddp.no_sync():
                torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=4, help="of the factors")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup-steps", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="variants to run")
    parser.add_argument("--layouts", action="store_true", help="print what is sent of each bucket")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    mp.spawn(run, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
