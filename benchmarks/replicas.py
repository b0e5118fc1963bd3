"""Bytes that a reducer sends between replicas, and its loss: a small GPT under HSDP, on 2 replicas of 2 shards.

    python -m benchmarks.replicas [--steps 200] [--seeds 0 1 2] [--only TEXT] [--into docs/guides/sharded-models.md]

Each reducer trains the same model on the same text, once for each seed. Bytes are those that a rank sends on its
sockets in a step, less those that it sends with a reducer that sends nothing: they are what crosses between replicas,
and are compared with those of FSDP's own all-reduce. The loss is that of text that was held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import overlap
from benchmarks.measuring import socket_bytes
from benchmarks.pages import in_columns, in_markdown, write_between
from benchmarks.race.tasks import Task, load_task
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap import AllReduce, Cast, Int4, Int8, PowerSGD, Quantize, Stage, route

BEGIN, END = "<!-- replicas -->", "<!-- end of replicas -->"
SHAPE = (2, 2)
PLAIN = "FSDP's own all-reduce"
REDUCERS: dict[str, Callable[[], Stage] | None] = {
    PLAIN: None,
    "AllReduce()": AllReduce,
    "Cast(torch.bfloat16)": lambda: Cast(torch.bfloat16),
    "Quantize(Int8())": lambda: Quantize(Int8()),
    "Quantize(Int4(), error_feedback=True)": lambda: Quantize(Int4(), error_feedback=True),
    "PowerSGD(rank=4)": lambda: PowerSGD(rank=4),
    'route({"*.weight": Quantize(Int8()), "*": AllReduce()})': lambda: route(
        {"*.weight": Quantize(Int8()), "*": AllReduce()}
    ),
}


def _trained(
    task: Task, mesh: DeviceMesh, reducer: Callable[[], Stage] | None, *, seed: int, steps: int
) -> tuple[float, float]:
    """The loss after ``steps``, and the bytes that this rank has sent in one of them, to all ranks."""
    torch.manual_seed(seed)
    model = task.make_model()
    blocks = model.blocks
    assert isinstance(blocks, nn.Sequential)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    registration = None if reducer is None else overlap.register(model, reducer())
    optimizer = task.make(model.parameters())
    sent_bytes, batches = 0.0, task.batches(seed, dist.get_rank(), dist.get_world_size())
    for step, (inputs, targets) in enumerate(islice(batches, steps)):
        if step == steps - 2:
            dist.barrier()
            sent_bytes = socket_bytes()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if step == steps - 2:  # Only when all have received is all of it sent.
            dist.barrier()
            sent_bytes = socket_bytes() - sent_bytes
    model.eval()
    with torch.no_grad():
        loss = task.evaluate(model)
    if registration is not None:
        registration.remove()
    return loss, sent_bytes


def measured(
    world: World, names: Sequence[str], seeds: Sequence[int], steps: int
) -> dict[str, tuple[list[float], float]]:
    """By reducer: the loss of each seed, and the bytes between replicas."""
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("replicate", "shard"))
    task, found = load_task("text", width=64, batch_size=16), {}
    _, within_bytes = _trained(task, mesh, overlap.hooks.NoReduction, seed=0, steps=4)
    for name in names:
        world.begin(name)
        ends = [_trained(task, mesh, REDUCERS[name], seed=seed, steps=steps) for seed in seeds]
        found[name] = [loss for loss, _ in ends], ends[0][1] - within_bytes
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="4 or more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", metavar="TEXT", help="beside FSDP's own, reducers whose name contains it")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="replace the table of this page")
    options = parser.parse_args(argv)
    names = [name for name in REDUCERS if name == PLAIN or options.only in name]
    with open_network(SHAPE[0] * SHAPE[1]) as network:
        found = run_on_ranks(network, measured, names, options.seeds, options.steps)[0]
    _, plain_bytes = found[PLAIN]
    rows = [["reducer", "bytes between replicas", f"loss after {options.steps} steps, of each seed"]]
    for name, (losses, sent_bytes) in found.items():
        of_seeds = ", ".join(f"{loss:.3f}" for loss in losses)
        rows.append([f"`{name}`" if name != PLAIN else name, f"{sent_bytes / plain_bytes:.3f}", of_seeds])
    print(in_columns(rows))
    if options.into is not None:
        write_between(options.into, BEGIN, END, in_markdown(rows))


if __name__ == "__main__":
    main()
