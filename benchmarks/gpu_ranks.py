"""Steps on all GPUs of this machine: plain DDP through NCCL, PyTorch's own ways, FSDP2, and chains.

    torchrun --standalone --nproc-per-node gpu -m benchmarks.gpu_ranks --json ranks.json [--time-limit 200]

One GPU is a world of one rank, whose collectives cost their launches alone. With more ranks than GPUs several share
one, and NCCL sends through TCP: a slow link, for which there are rows of their own. A cell is a model, a batch, a
bucket size and a way to train: steps to warm up, some in a row for the step's time, and a few alone, in which the
host's time is that until `step()` returns, and of which one is profiled for the launches. Times, and memory after the
warm-up, are of the worst rank. The cells follow by importance until the time is over; the file is written after each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import CRASHED
from benchmarks.link import shared_gpu_env
from benchmarks.measuring import MemoryMeter
from benchmarks.models import WORKLOADS
from benchmarks.ranks import die_with_parent
from benchmarks.recipes import (
    Maker,
    Recipe,
    plain,
    reduced,
    sharded,
    stepped,
    stepped_by_loop,
    torch_hook,
    torch_powersgd,
    torch_zero,
)
from overlap import AllReduce, Cast, Int4, Int8, PowerSGD, Quantize, Stage, chain
from overlap._torch.device import synchronize
from overlap.hooks.engine.registration import Registration, registration_of

# Steps: to warm up, in a row, alone.
_STEPS = {"cuda": (20, 10, 5), "slow": (4, 4, 1), "cpu": (3, 2, 1)}
_ADAMW = Maker(torch.optim.AdamW, {"lr": 1e-4, "fused": True})


# With the full batch of each rank; a quarter of it is where communication shows.
MODELS = {"cuda": {"gpt-350m": 8, "resnet50-224": 128, "gpt-1.3b": 8}, "cpu": {"mlp-batchnorm": 8}}
FSDP = "FSDP2, bf16"
PLAIN: dict[str, Recipe | None] = {
    "plain DDP": plain,
    "DDP, bf16 hook": torch_hook(default_hooks.bf16_compress_hook),
}
ROWS: dict[str, Recipe | None] = {
    **PLAIN,
    "Step": stepped(),
    "Step, released": stepped(release_gradients=True),
    "Step, deferred, bf16": stepped(lambda: Cast(torch.bfloat16, AllReduce()), deferred=True),
    "ZeroStep, deferred, in forward": sharded(deferred=True, gather="forward"),
    "torch ZeRO": torch_zero,
    FSDP: None,
}
# A replica on each rank, reduced in fp32 without a chain; with one between replicas.
HSDP: dict[str, Callable[[], Stage] | None] = {
    "HSDP": None,
    "HSDP, Cast(bfloat16)": lambda: Cast(torch.bfloat16, AllReduce()),
    "HSDP, Quantize(Int8())": lambda: Quantize(Int8()),
    "HSDP, Quantize(Int4(), error_feedback=True)": lambda: Quantize(Int4(), error_feedback=True),
}
SLOW_MODEL = {"cuda": {"gpt-350m": 8}, "cpu": MODELS["cpu"]}
SLOW_ROWS: dict[str, Recipe | None] = {
    **PLAIN,
    "DDP, PowerSGD hook of rank 4": torch_powersgd,
    "Step, deferred": stepped(deferred=True),
    "Cast(bfloat16)": reduced(lambda: Cast(torch.bfloat16, AllReduce())),
    "Quantize(Int8())": reduced(lambda: Quantize(Int8())),
    "Quantize(Int4(), error_feedback=True)": reduced(lambda: Quantize(Int4(), error_feedback=True)),
    "PowerSGD(rank=4)": reduced(lambda: PowerSGD(rank=4)),
    "ZeroStep, deferred, in forward": sharded(deferred=True, gather="forward"),
    "torch ZeRO": torch_zero,
    **dict.fromkeys(HSDP),
}


@dataclass(kw_only=True)
class Cell:
    model: str
    batch: int
    bucket_mb: int
    row: str
    step_ms: float = 0.0
    host_ms: float = 0.0
    launches: int = 0
    peak_bytes: int = 0
    status: str = "not run"


def cells(device: str, *, is_slow: bool) -> Iterator[Cell]:
    if is_slow:
        for (model, batch), row in product(SLOW_MODEL[device].items(), SLOW_ROWS):
            yield Cell(model=model, batch=batch, bucket_mb=25, row=row)
        return
    shares, buckets_mb = ((1, 4), (25, 100)) if device == "cuda" else ((1,), (25,))
    for share, (model, batch), bucket_mb, row in product(shares, MODELS[device].items(), buckets_mb, ROWS):
        if row != FSDP or bucket_mb == 25:  # It has no buckets.
            yield Cell(model=model, batch=batch // share, bucket_mb=bucket_mb, row=row)


def measure(cell: Cell, device: torch.device, *, is_slow: bool) -> None:
    workload = WORKLOADS[cell.model]
    torch.manual_seed(dist.get_rank())
    inputs, target = (one.to(device) for one in workload.make_batch(cell.batch))
    torch.manual_seed(0)
    with device:
        model = workload.make_model()
    recipe = {**SLOW_ROWS, **ROWS}[cell.row]
    sharded_by: Registration | None = None
    if recipe is None:
        wrapped = _fully_sharded(model, between_replicas=cell.row in HSDP)
        if (reducer := HSDP.get(cell.row)) is not None:
            sharded_by = chain(reducer()).register(wrapped)
        update = stepped_by_loop(_ADAMW(wrapped.parameters()))
    else:
        ddp = wrapped = DistributedDataParallel(model, bucket_cap_mb=cell.bucket_mb, gradient_as_bucket_view=True)
        update = recipe(ddp, _ADAMW)
    warm_up, in_row, alone = _STEPS["slow" if is_slow else device.type]
    is_cast = workload.autocast is not None and device.type != "cpu"

    def step() -> None:
        update.clear()
        with torch.autocast(device.type, workload.autocast, enabled=is_cast):
            loss = nn.functional.cross_entropy(wrapped(inputs), target)
        loss.backward()
        update.step()

    def repeat(times: int) -> None:
        for _ in range(times):
            step()

    try:
        repeat(warm_up)
        meter = MemoryMeter(device)
        in_row_s = _timed(lambda: repeat(in_row), device)[1]
        alone_s = [_timed(step, device)[0] for _ in range(alone)]
        cell.launches = _launches(step, device)
        update.finish()
        worst = torch.tensor([in_row_s / in_row, statistics.median(alone_s), meter.peak_bytes()], device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        cell.step_ms, cell.host_ms, cell.peak_bytes = 1e3 * worst[0].item(), 1e3 * worst[1].item(), int(worst[2])
    finally:
        registration = sharded_by if recipe is None else registration_of(ddp)
        if registration is not None:
            registration.remove()


def _fully_sharded(model: nn.Module, *, between_replicas: bool) -> nn.Module:
    """Each block and the rest, gathered once a step, in bf16; with BatchNorm in autocast, and reduced in bf16. Or a
    replica on each rank (HSDP of shards of one rank), reduced in fp32."""
    has_norm = any(isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d) for one in model.modules())
    dtype = torch.bfloat16
    reduce_dtype = torch.float32 if between_replicas else dtype
    policy = MixedPrecisionPolicy(param_dtype=None if has_norm else dtype, reduce_dtype=reduce_dtype)
    device_type, mesh = next(model.parameters()).device.type, None
    if between_replicas:
        shape = (dist.get_world_size(), 1)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    model.to(memory_format=torch.contiguous_format)  # It takes no others.
    for module in (*getattr(model, "blocks", ()), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    return model


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds until `call` returns, and until the device is done."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start_s = time.perf_counter()
    call()
    returned_s = time.perf_counter()
    synchronize(device)
    return returned_s - start_s, time.perf_counter() - start_s


def _launches(step: Callable[[], None], device: torch.device) -> int:
    """Of kernels, by this rank in one step; 0 on the CPU."""
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *activities]) as profiler:
        step()
        synchronize(device)
    return sum(one.count for one in profiler.key_averages() if "LaunchKernel" in one.key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(MODELS), default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--slow", action="store_true", help="the rows for slow links; so with more ranks than GPUs")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument("--time-limit", type=float, default=200.0, metavar="SECONDS", help="begin no cell after it")
    options = parser.parse_args()
    die_with_parent()
    until_s = time.monotonic() + options.time_limit
    device, is_slow = torch.device("cpu"), options.slow
    if options.device == "cuda":
        gpus, rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
        if is_slow := int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
            os.environ.update(shared_gpu_env(rank))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    found = [cell for cell in cells(options.device, is_slow=is_slow) if options.only in cell.row]
    for cell in found:
        verdict = torch.tensor(float(time.monotonic() < until_s), device=device)
        dist.broadcast(verdict, 0)
        if not verdict.item():
            break
        cell.status = CRASHED  # While it runs.
        _save(found, options.json)
        try:
            measure(cell, device, is_slow=is_slow)
            cell.status = "ok"
        except Exception as error:
            traceback.print_exc()
            cell.status = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        _save(found, options.json)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _save(found: list[Cell], file: Path) -> None:
    if dist.get_rank() == 0:
        file.write_text(json.dumps([asdict(cell) for cell in found], indent=1))


if __name__ == "__main__":
    main()
