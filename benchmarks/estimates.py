"""The table of estimates in docs/choose.md, in Markdown, and the processor's time that estimates for CPUs take.

    python -m benchmarks.estimates [--cpu 3]

`--cpu` prints, from so many runs, the nanoseconds that a rank's process works for each gradient beyond a forward and
backward pass inside `no_sync`: copies into and out of buckets, codecs, and the work of Gloo's threads and the kernel
to send. ResNet-18 on two ranks of one thread, links of 1 Gbit/s where they can be had. It is CPU time, so other work on
the machine hardly counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import WORKLOADS
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap import AllReduce, Cast, Int4, Int8, PowerSGD, Quantize, Stage, chain
from overlap.estimate import CHAINS, Job, step_ms

_LINKS = {
    "1 Gbit/s": (1.0, 4, 8),
    "10 Gbit/s": (10.0, 4, 8),
    "25 Gbit/s": (25.0, 4, 8),
    "100 Gbit/s": (100.0, 4, 8),
    "one machine, PCIe": (100.0, 8, 1),
    "one machine, NVLink": (2960.0, 8, 1),
}
_MICROBATCHES = (1, 8)
_HEADINGS = {
    "Cast(bfloat16)": "Cast",
    "Quantize(Int8())": "Int8",
    "Quantize(Int4(), error_feedback=True)": "Int4",
    "PowerSGD(rank=4)": "PowerSGD",
    "LocalSGD(period=8)": "LocalSGD",
    "ZeroStep(gather='forward')": "ZeroStep",
}


def grid() -> Iterator[str]:
    """How many times as fast as DDP: by link and by tokens a rank and synchronization. The size of the model cancels:
    computing, sending and updating all grow with it."""
    chains = [chain for chain in CHAINS if chain.name in _HEADINGS]
    yield f"| link of a machine | tokens | {' | '.join(f'`{_HEADINGS[chain.name]}`' for chain in chains)} |"
    yield f"| --- | ---: |{' ---: |' * len(chains)}"
    for link, (gbit, machines, ranks) in _LINKS.items():
        for microbatches in _MICROBATCHES:
            job = Job(link_gbit=gbit, machines=machines, ranks_a_machine=ranks, microbatches=microbatches)
            plain = step_ms(job, CHAINS[0])
            cells = [f"{plain / step_ms(job, chain):.1f}" for chain in chains]
            yield f"| {link} | {job.tokens * microbatches:,} | {' | '.join(cells)} |"


_REDUCERS: dict[str, Callable[[], Stage]] = {
    "DDP": AllReduce,
    "Cast(bfloat16)": lambda: Cast(torch.bfloat16),
    "Quantize(Int8())": lambda: Quantize(Int8()),
    "Quantize(Int4(), error_feedback=True)": lambda: Quantize(Int4(), error_feedback=True),
    "PowerSGD(rank=4)": lambda: PowerSGD(rank=4, start_step=0),
}
_STEPS, _WARM_UP = 20, 3


def cpu_ns(world: World) -> dict[str, float]:
    """Of each chain, for a gradient: the median of steps in which the chains take turns."""
    torch.set_num_threads(1)
    inputs, target = WORKLOADS["resnet18"].make_batch(8)

    def wrapped() -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(WORKLOADS["resnet18"].make_model())

    models = {"alone": wrapped(), **{name: wrapped() for name in _REDUCERS}}
    for name, make in _REDUCERS.items():
        chain(make()).register(models[name])
    spent: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(_WARM_UP + _STEPS):
        for name, ddp in models.items():
            ddp.zero_grad()
            with ddp.no_sync() if name == "alone" else nullcontext():
                world.meet()
                start_s = time.process_time()
                cross_entropy(ddp(inputs), target).backward()
                spent[name].append(time.process_time() - start_s)
    medians = {name: statistics.median(times[_WARM_UP:]) for name, times in spent.items()}
    numel = sum(parameter.numel() for parameter in models["alone"].parameters())
    return {name: 1e9 * (medians[name] - medians["alone"]) / numel for name in _REDUCERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=0, help="runs")
    runs = parser.parse_args().cpu
    if not runs:
        print("\n".join(grid()))
        return
    with open_network(2, bandwidth="1gbit") as network:
        found = [rank for _ in range(runs) for rank in run_on_ranks(network, cpu_ns)]
    for name in _REDUCERS:
        print(f"{name:40}{statistics.median(rank[name] for rank in found):6.1f} ns", [f"{r[name]:.1f}" for r in found])


if __name__ == "__main__":
    main()
