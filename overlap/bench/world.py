"""The process group that a trial or a race runs in, and the ranks' meetings that send nothing over it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap._torch.custom_group import FileStore
from overlap.bench.collectives import COUNTED_BACKEND, register_counted_backend
from overlap.bench.settings import Plan
from overlap.bench.simulated import SIMULATED_BACKEND, LinkSpeed, LoneStore, register_simulated_backend
from overlap.bench.site import Site
from overlap.bench.workload import Workload, workload

_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Ranks exchange small values through files, so that what they say is not counted as traffic."""

    folder: Path
    rank: int
    ranks: int

    def exchange(self, name: str, value: Any, *, timeout_s: float) -> list[Any]:
        """Leaves `value` under `name`, waits for every rank's, and returns them by rank."""
        mine = self._path(name, self.rank)
        # Renamed into place: nobody reads half a file.
        mine.with_suffix(".part").write_text(json.dumps(value))
        mine.with_suffix(".part").rename(mine)
        deadline = time.monotonic() + timeout_s
        for rank in range(self.ranks):
            while not self._path(name, rank).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not reach {name!r} within {timeout_s:.0f} s")
                time.sleep(_POLL_S)
        return [json.loads(self._path(name, rank).read_text()) for rank in range(self.ranks)]

    def _path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}.json"


@dataclass(frozen=True, kw_only=True)
class World:
    """A rank's process group while it is open, the device it computes on, and its meetings with the others."""

    plan: Plan
    name: str
    device: torch.device
    meeting: Meeting
    workload: Workload

    def site(self) -> Site:
        """Ground for one more variant; every rank must ask in the same order."""
        return Site(
            settings=self.plan.settings,
            workload=self.workload,
            device=self.device,
            group=dist.new_group(),
        )

    def meet(self, label: str) -> None:
        """Returns once every rank is here; sends nothing over the group."""
        self.meeting.exchange(f"{self.name}-{label}", None, timeout_s=timeout_s(self.plan))

    def synchronize(self) -> None:
        """Waits for the device; a step on CUDA has only been launched when it returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timeout_s(plan: Plan) -> float:
    """How long a collective may take before it counts as hung: generous for a model of 100 MB on this link."""
    speed = plan.settings.bandwidth_bytes_per_s
    return 60.0 if speed is None else max(60.0, 10 * plan.settings.ranks * 100e6 / speed)


@contextmanager
def join_world(plan: Plan, rank: int, name: str, *, count: bool = False) -> Iterator[World]:
    """Opens the process group called `name` among the plan's processes.

    With `count`, NCCL's collectives are counted as they are issued; Gloo's traffic is counted on its sockets.
    """
    settings = plan.settings
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    limit = timedelta(seconds=timeout_s(plan))
    if plan.link == "simulated":
        assert settings.bandwidth_bytes_per_s is not None
        register_simulated_backend(
            LinkSpeed(bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s, latency_s=settings.latency_us / 1e6)
        )
        dist.init_process_group(
            SIMULATED_BACKEND,
            store=LoneStore(settings.ranks),
            rank=0,
            world_size=settings.ranks,
            timeout=limit,
        )
    else:
        backend = "gloo" if device.type == "cpu" else "nccl"
        if count and backend == "nccl" and plan.link == "direct":
            register_counted_backend(_nccl)
            backend = COUNTED_BACKEND
        store = FileStore(str(Path(plan.folder) / f"{name}.store"), plan.processes)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=plan.processes,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
        )
    meeting = Meeting(folder=Path(plan.folder), rank=rank, ranks=plan.processes)
    yield World(plan=plan, name=name, device=device, meeting=meeting, workload=workload(settings.model))
    # Not closed after an error: the others would report a closed connection in place of what went wrong here.
    dist.destroy_process_group()


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
