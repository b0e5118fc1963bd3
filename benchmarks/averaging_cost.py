"""What averaging the parameters of ResNet-18 over ranks on loopback takes, beside PyTorch's and a bare all-reduce.

    python benchmarks/averaging_cost.py [--ranks 2] [--rounds 20]

All take turns within one run, and each begins at a barrier; the slowest rank's times are compared. The bare all-reduce
is of one flat tensor of as many elements, which nobody packs, divides or copies; parameters do not lie in one tensor,
so the all-reduces of their large ones, where they are, are a row, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.model_averaging import utils as theirs

from overlap._torchvision import load_torchvision
from overlap.optim import average_parameters


def run(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    torch.manual_seed(rank)
    group = dist.group.WORLD
    assert group is not None
    ours, others = (load_torchvision().models.resnet18() for _ in range(2))
    flat = torch.randn(sum(parameter.numel() for parameter in ours.parameters()))
    large = [parameter.detach() for parameter in ours.parameters() if parameter.nbytes >= 2**20]

    def all_reduce_large() -> None:
        for parameter in large:
            dist.all_reduce(parameter, group=group)

    timed: dict[str, Callable[[], None]] = {
        "PyTorch's average_parameters": lambda: theirs.average_parameters(others.parameters(), group),
        "overlap.optim.average_parameters": lambda: average_parameters(ours.parameters(), group),
        f"all-reduces of the {len(large)} parameters of a MiB and more, nothing else": all_reduce_large,
        "one all-reduce, nothing else": lambda: dist.all_reduce(flat, group=group),
    }
    measured_s: dict[str, list[float]] = {name: [] for name in timed}
    cpu_s: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.rounds + 3):
        for name, call in timed.items():
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            call()
            took_s = torch.tensor([time.perf_counter() - start_s, time.process_time() - start_cpu_s])
            dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
            if number >= 3:
                measured_s[name].append(float(took_s[0]))
                cpu_s[name].append(float(took_s[1]))
    if rank == 0:
        base_s = statistics.median(measured_s["PyTorch's average_parameters"])
        what = f"{flat.numel() / 1e6:.1f} million parameters, {options.ranks} ranks"
        print(f"| {what} | ms | p25 - p75 | ratio | CPU ms |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, found_s in measured_s.items():
            p25, median, p75 = (1e3 * each for each in statistics.quantiles(found_s, n=4))
            cpu = 1e3 * statistics.median(cpu_s[name])
            print(f"| {name} | {median:.1f} | {p25:.1f} - {p75:.1f} | {median / 1e3 / base_s:.2f} | {cpu:.1f} |")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29741", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    mp.spawn(run, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
