"""The process groups that parts run in."""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.given import Given
from benchmarks.link import shared_gpu_env

__all__ = ["checks_of_gpu", "device_of", "join_ranks"]

_TIMEOUT = timedelta(seconds=60)
_TESTS = str(Path(__file__).parents[2] / "tests")


def checks_of_gpu(name: str) -> Any:
    """A module of `tests/gpu`."""
    if _TESTS not in sys.path:
        sys.path.append(_TESTS)  # It stays there: the processes that checks start find it in it.
    return importlib.import_module(f"gpu.{name}")


def device_of(given: Given) -> torch.device:
    """The device of this process; ranks share one where there are too few."""
    torch.set_num_threads(1)
    if given.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", given.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_ranks(given: Given) -> torch.device:
    """Joins the part's ranks by NCCL, or by Gloo on a CPU; returns this rank's device."""
    device = device_of(given)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda" and given.ranks > torch.cuda.device_count():
        # Two ranks of one GPU reach each other through sockets alone.
        os.environ.update(shared_gpu_env(given.rank) | {"NCCL_NET": "Socket"})
    store = dist.FileStore(str(given.scratch / "store"), given.ranks)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=given.rank,
        world_size=given.ranks,
        timeout=_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    dist.barrier()
    return device
