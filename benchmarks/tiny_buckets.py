"""What a step costs where there is nothing to hide: tiny parameters, many in one bucket or each in its own.

    python benchmarks/tiny_buckets.py [--ranks 2] [--rounds 150] [--into docs/benchmarks.md]

A chain of linear layers of 8 x 8 on loopback. Computing, reducing and updating take microseconds, so what is measured
is what each way of updating costs by itself. All variants of a model live in the same processes, each with a process
group of its own, and take turns step by step in an order that is shuffled for every round. Wall time is that of the
slowest rank; CPU time is that of all threads, the mean over ranks. Rounds after the first 80 count: in the first 16
passes values are compared more often. With ``--into`` the table takes the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import overlap

WIDTH = 8
BEGIN, END = "<!-- tiny buckets -->", "<!-- end of tiny buckets -->"
PLAIN = "plain DDP"

Step = Callable[[], None]


@dataclass(frozen=True)
class Model:
    """So many parameters, in one bucket or each in its own."""

    parameters: int
    is_one_bucket: bool

    @property
    def name(self) -> str:
        buckets = "one bucket" if self.is_one_bucket else f"{self.parameters} buckets"
        return f"{self.parameters} parameters, {buckets}"

    def wrapped(self, group: Any) -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.parameters // 2)))
        for layer in layers:
            nn.init.orthogonal_(layer.weight)  # So that gradients neither vanish nor grow.
        cap_mb = 25 if self.is_one_bucket else 1 / 2**20
        return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=cap_mb)


MODELS = [Model(18, False), Model(152, False), Model(152, True), Model(600, True), Model(3000, True)]


def plain(ddp: DistributedDataParallel, cls: Any, options: dict[str, Any]) -> Step:
    return _loop(ddp, cls(ddp.parameters(), **options))


def torch_hook(ddp: DistributedDataParallel, cls: Any, options: dict[str, Any]) -> Step:
    ddp.register_comm_hook(ddp.process_group, default_hooks.allreduce_hook)
    return _loop(ddp, cls(ddp.parameters(), **options))


def torch_hook_then_optimizer(ddp: DistributedDataParallel, cls: Any, options: dict[str, Any]) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as hooks
    from torch.distributed.optim import as_functional_optim

    functional = {name: value for name, value in options.items() if name != "fused"}
    state = hooks._OptimizerHookState(as_functional_optim(cls, **functional))
    ddp.register_comm_hook(ddp.process_group, hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    return _loop(ddp, None)


def interleaved(ddp: DistributedDataParallel, cls: Any, options: dict[str, Any], **form: Any) -> Step:
    optimizer = overlap.OverlappedOptimizer(cls(ddp.parameters(), **options))
    overlap.chain(overlap.AllReduce(), overlap.Step(optimizer, **form)).register(ddp)
    return _loop(ddp, optimizer)


def deferred(ddp: DistributedDataParallel, cls: Any, options: dict[str, Any]) -> Step:
    return interleaved(ddp, cls, options, deferred=True)


def zero_step(ddp: DistributedDataParallel, cls: Any, options: dict[str, Any]) -> Step:
    group = ddp.process_group
    zero = overlap.ZeroRedundancyOptimizer(ddp.parameters(), cls, process_group=group, overlap_with_ddp=True, **options)
    overlap.chain(overlap.ZeroStep(zero)).register(ddp)
    return _loop(ddp, zero)


VARIANTS: dict[str, Callable[[DistributedDataParallel, Any, dict[str, Any]], Step]] = {
    PLAIN: plain,
    "torch, allreduce_hook": torch_hook,
    "torch, hook_then_optimizer": torch_hook_then_optimizer,
    "interleaved": interleaved,
    "deferred": deferred,
    "ZeroStep": zero_step,
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}


def _loop(ddp: DistributedDataParallel, optimizer: Any) -> Step:
    x, weights = torch.randn(2, WIDTH), torch.randn(2, WIDTH)

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        else:
            ddp.zero_grad()
        (ddp(x) * weights).sum().backward()
        if optimizer is not None:
            optimizer.step()

    return step


@dataclass
class Measured:
    """Of one variant of one model, in each round, in microseconds."""

    wall_us: list[float]
    cpu_us: list[float]


def measured(model: Model, options: argparse.Namespace) -> dict[str, Measured]:
    """The variants of ``model``, step by step in turn; on every rank the same."""
    optimizer_class, arguments = OPTIMIZERS[options.optimizer]
    steps: dict[str, Step] = {}
    for name in options.only or VARIANTS:
        try:
            steps[name] = VARIANTS[name](model.wrapped(dist.new_group()), optimizer_class, arguments)
        except (ImportError, AttributeError, TypeError) as error:
            if dist.get_rank() == 0:
                print(f"{name}: left out, {type(error).__name__}: {error}", flush=True)
    order = random.Random(0)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for number in range(options.warmup + options.rounds):
        for name in order.sample(list(steps), len(steps)):
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            steps[name]()
            took = 1e6 * (time.perf_counter() - start_s), 1e6 * (time.process_time() - start_cpu_s)
            if number >= options.warmup:
                taken[name].append(took)
        if number % 10 == 0:
            gc.collect()
    gc.enable()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, taken)
    return {
        name: Measured(
            [max(times[0] for times in each) for each in zip(*(one[name] for one in gathered), strict=True)],
            [
                statistics.mean(times[1] for times in each)
                for each in zip(*(one[name] for one in gathered), strict=True)
            ],
        )
        for name in steps
    }


def table(found: dict[str, dict[str, Measured]]) -> str:
    lines = [
        "| model | variant | wall, us | quartiles | ratio | CPU, us | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, variants in found.items():
        base = variants.get(PLAIN) or next(iter(variants.values()))
        for name, one in variants.items():
            low, middle, high = statistics.quantiles(one.wall_us, n=4)
            cpu = statistics.median(one.cpu_us)
            lines.append(
                f"| {model} | {name} | {middle:,.0f} | {low:,.0f} to {high:,.0f} | "
                f"{middle / statistics.median(base.wall_us):.2f} | {cpu:,.0f} | "
                f"{cpu / statistics.median(base.cpu_us):.2f} |"
            )
    return "\n".join(lines)


def run(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    found = {}
    for model in MODELS:
        if options.models and not any(wanted in model.name for wanted in options.models):
            continue
        found[model.name] = measured(model, options)
        if rank == 0:
            print(table({model.name: found[model.name]}), flush=True)
    if rank == 0 and options.into is not None:
        _insert(options.into, table(found))
    dist.destroy_process_group()


def _insert(path: Path, text: str) -> None:
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=150, help="that count")
    parser.add_argument("--warmup", type=int, default=80, help="rounds before those")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="variants to run")
    parser.add_argument("--models", nargs="*", help="parts of the names of the models to run")
    parser.add_argument("--into", type=Path, help="a Markdown file that has the two comments")
    parser.add_argument("--port", default="29741")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=options.port, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    mp.spawn(run, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
