"""A chain on a model of a few buckets, in a process group of this process alone, beside plain DDP."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap import AllReduce, OverlappedOptimizer, Step, chain
from overlap._torch.autograd import issue_without_saved_context
from overlap._torch.custom_group import HashStore
from overlap._torch.needs import NEEDS, Need, missing_names, samples

__all__ = ["Missing", "compare_with_plain", "missing_of_torch", "own_group"]

_STEPS = 4
# A bucket a layer.
_BUCKET_CAP_MB = 0.001
_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Missing:
    """What this version of PyTorch lacks of one need."""

    need: Need
    names: tuple[str, ...]
    optional: tuple[str, ...]


@contextmanager
def own_group() -> Iterator[None]:
    """The default process group, of Gloo and of this process alone, where there is none."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    try:
        yield
    finally:
        # Models and their reducers are in cycles, and hold the group. Its threads must end now and not while the
        # interpreter exits, when a thread that returns to Python is an error.
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def missing_of_torch() -> list[Missing]:
    """For each need, what is not there; within :func:`own_group`."""
    ddp = _ddp(_model())
    objects = samples(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    return [
        Missing(need, tuple(missing_names(need.names, objects)), tuple(missing_names(need.optional, objects)))
        for need in NEEDS
    ]


def compare_with_plain() -> int:
    """Trains by ``chain(AllReduce(), Step(...))`` and plainly; returns how many parameters differ in any bit.

    Within :func:`own_group`; raises whatever PyTorch or the chain raises.
    """
    model = _model()
    plain, overlapped = _ddp(copy.deepcopy(model)), _ddp(model)
    # DDP's own collectives could hang or abort the end of the process.
    issue_without_saved_context(plain.parameters())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = OverlappedOptimizer(torch.optim.AdamW(overlapped.parameters(), lr=1e-2))
    registration = chain(AllReduce(), Step(optimizer)).register(overlapped)
    inputs = torch.arange(32, dtype=torch.float32, device="cpu").view(4, 8) / 32
    for _ in range(_STEPS):
        plain_optimizer.zero_grad()
        plain(inputs).square().sum().backward()
        plain_optimizer.step()
        overlapped(inputs).square().sum().backward()
        optimizer.step()
    registration.remove()
    pairs = zip(plain.parameters(), overlapped.parameters(), strict=True)
    return sum(not torch.equal(one, other) for one, other in pairs)


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8, device="cpu") for _ in range(4)))


def _ddp(model: nn.Module) -> DistributedDataParallel:
    with warnings.catch_warnings():
        # PyTorch's own, of what it imports.
        warnings.simplefilter("ignore")
        return DistributedDataParallel(model, bucket_cap_mb=_BUCKET_CAP_MB)
