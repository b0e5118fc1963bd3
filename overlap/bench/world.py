"""The process group that a trial or a timing runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from overlap._torch.custom_group import FileStore
from overlap.bench.file_exchange import FileExchange
from overlap.bench.settings import RunConfig
from overlap.bench.simulated import SIMULATED_BACKEND, SimulatedLink, register_simulated_backend
from overlap.bench.training_setup import TrainingSetup
from overlap.bench.workload import Workload, workload


@dataclass(frozen=True, kw_only=True)
class BenchWorld:
    """A rank's process group while it is open, the device it computes on, and what it needs to train a variant."""

    config: RunConfig
    name: str
    device: torch.device
    files: FileExchange
    workload: Workload

    def training_setup(self, optimizer: str | None = None) -> TrainingSetup:
        """What one more variant is built from, with a group of its own; every rank must ask in the same order."""
        return TrainingSetup(
            settings=self.config.settings,
            workload=self.workload,
            device=self.device,
            group=dist.new_group(),
            is_simulated=self.config.link == "simulated",
            optimizer_name=optimizer or self.config.settings.optimizer,
        )

    def wait_for_ranks(self, label: str) -> None:
        """Returns once every rank is here; sends nothing over the group."""
        self.files.exchange(f"{self.name}-{label}", None, timeout_s=timeout_s(self.config))

    def synchronize(self) -> None:
        """Waits for the device; a step on CUDA has only been launched when it returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timeout_s(config: RunConfig) -> float:
    """How long a collective may take before it counts as hung: generous for a model of 100 MB on this link."""
    speed = config.settings.bandwidth_bytes_per_s
    return 60.0 if speed is None else max(60.0, 10 * config.settings.ranks * 100e6 / speed)


@contextmanager
def open_world(config: RunConfig, rank: int, name: str) -> Iterator[BenchWorld]:
    """Opens the process group called `name` among the run's processes."""
    settings = config.settings
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backend = "gloo" if device.type == "cpu" else "nccl"
    if config.link == "simulated":
        assert settings.bandwidth_bytes_per_s is not None
        link = SimulatedLink(bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s, latency_s=settings.latency_us / 1e6)
        register_simulated_backend(link)
        backend = SIMULATED_BACKEND
    dist.init_process_group(
        backend,
        store=FileStore(str(Path(config.folder) / f"{name}.store"), config.processes),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=timeout_s(config)),
        device_id=device if backend == "nccl" else None,
    )
    files = FileExchange(folder=Path(config.folder), rank=rank, ranks=config.processes)
    yield BenchWorld(config=config, name=name, device=device, files=files, workload=workload(settings.model))
    # Not closed after an error: the others would report a closed connection in place of what went wrong here.
    dist.destroy_process_group()
