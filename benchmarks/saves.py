"""The memory and disk space that saving and loading a run take, and the cost of planning a save at many ranks.

    python -m benchmarks.saves [--ranks 2 6] [--layers 14] [--simulated 512]

Each row is a world of fresh processes with a model of ``--layers`` matrices of 4 MiB, error feedback and a sharded
AdamW. Figures are of the state of a rank, the largest of all ranks; on disk, of the states of all ranks. The last line
plans, in this process alone, the save of a GPT of 302 M parameters in 288 tensors by as many ranks as are simulated.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from benchmarks.measuring import MemoryMeter
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap import Int4, Quantize, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap._torch.checkpoint import Boxes, SavePlanner
from overlap.optim.zero.shards import chunk

_MIB = 2**20
_WIDTH = 1024
COLUMNS = ("save", "save, wait=False", "load", "TrainState.state_dict()", "dcp.save of it", "on disk")


def cell(world: World, folder: str, layers: int) -> tuple[float, dict[str, float]]:
    """The MiB of this rank's state, and the figures of a row."""
    ddp = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))), gradient_as_bucket_view=True
    )
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    chain(Quantize(Int4(), error_feedback=True), ZeroStep(zero)).register(ddp)
    for _ in range(3):
        ddp(torch.randn(2, _WIDTH)).square().mean().backward()
        zero.step()
    model, ranks = sum(parameter.nbytes for parameter in ddp.parameters()), dist.get_world_size()
    own = 2 * model + 2 * model / ranks  # The model, its error feedback, and this rank's moments.
    meter, path = MemoryMeter(world.device), Path(folder)

    def rise(action: Callable[[], Any]) -> float:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # The recorded peak is the present size.
        before = meter.peak_bytes()
        action()
        return float((meter.peak_bytes() - before) / own)

    def in_background() -> None:
        future = overlap.save(path / "background", ddp, zero, wait=False)
        assert future is not None
        future.result()

    overlap.save(path / "first", ddp, zero)  # With it PyTorch's modules are imported.
    found = {"save": rise(lambda: overlap.save(path / "run", ddp, zero))}
    found["save, wait=False"] = rise(in_background)
    found["load"] = rise(lambda: overlap.load(path / "run", ddp, zero))
    train_state = overlap.TrainState(ddp, zero)
    found["TrainState.state_dict()"] = rise(train_state.state_dict)
    found["dcp.save of it"] = rise(lambda: dcp.save({"run": train_state}, checkpoint_id=path / "dcp"))
    written = sum(file.stat().st_size for file in (path / "run").iterdir())
    found["on disk"] = written / (model + ranks * model + 2 * model)
    return own / _MIB, found


class _Simulated:
    """A flat tensor that is planned and never written."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32) -> None:
        self._numel, self.dtype = numel, dtype

    def numel(self) -> int:
        return self._numel

    def __getitem__(self, elements: slice) -> Tensor:
        raise NotImplementedError


def planned(ranks: int) -> str:
    """The metadata of a save by ``ranks``, and the time of rank 0."""
    shapes = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096), *[(1024,)] * 8] * 24
    size, plans = 4 * sum(torch.Size(shape).numel() for shape in shapes), []
    for rank in range(ranks):
        items = {f"overlap.bytes.{rank}": Boxes.chunk(_Simulated(size, torch.uint8), (size,), (1,), 0)}
        for place, shape in enumerate(shapes):
            whole, numel = torch.empty(shape, device="meta"), torch.Size(shape).numel()
            start, end = chunk(numel, 4, on_streams=True, rank=rank, ranks=ranks)
            name = f"layers.{place // 12}.{place % 12}.weight"
            items[f"model.{name}"] = Boxes.whole(whole).share(name, rank, ranks)
            for key in ("exp_avg", "exp_avg_sq"):
                part = Boxes.chunk(_Simulated(end - start), shape, whole.stride(), start)
                items[f"optim.state.{name}.{key}"] = part
        planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(items, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    begun = time.process_time()
    _, metadata = planner.create_global_plan(plans)
    took_s, of_rank = time.process_time() - begun, len(pickle.dumps(plans[0])) / 1024
    return (
        f"{ranks} simulated ranks: metadata of {len(pickle.dumps(metadata)) / _MIB:.0f} MiB, without where boxes lie, "
        f"a rank's plan of {of_rank:.0f} KiB, and {took_s:.0f} s of rank 0's processor"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--simulated", type=int, default=512)
    options = parser.parse_args()
    os.environ.update(MALLOC_TRIM_THRESHOLD_="0", MALLOC_MMAP_THRESHOLD_="65536")  # Freed memory is given back.
    header = ["ranks", "MiB of a rank's state", *COLUMNS]
    print("|", " | ".join(header), "|\n|", " | ".join(["--:"] * len(header)), "|")
    for ranks in options.ranks:
        folder = tempfile.mkdtemp()
        try:
            with open_network(ranks) as network:
                of_ranks = run_on_ranks(network, cell, folder, options.layers)
        finally:
            shutil.rmtree(folder)
        worst = [f"{max(found[column] for _, found in of_ranks):.2f}" for column in COLUMNS]
        print("|", " | ".join([str(ranks), f"{of_ranks[0][0]:.0f}", *worst]), "|", flush=True)
    if options.simulated:
        print(planned(options.simulated))


if __name__ == "__main__":
    main()
