"""Peaks of memory, of active bytes: what was freed while another stream might still use it is of no use to others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import MemoryMeter
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, offload_wrapper
from overlap import chain as chained

from .check import Check

__all__ = ["memory_checks"]

_WIDTH = 1024
_LAYERS = 8
_STEPS = 4


def _model(device: torch.device, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> nn.Module:
    torch.manual_seed(0)
    layers = (wrap(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU())) for _ in range(_LAYERS))
    return nn.Sequential(*layers).to(device)


def _peak_bytes(device: torch.device, build: Callable[[], tuple[nn.Module, Any]], batch: int) -> int:
    gc.collect()  # A DDP model is part of a cycle: the one before may still be there.
    model, optimizer = build()
    x = torch.randn(batch, _WIDTH, device=device)
    for step in range(_STEPS):
        if step == _STEPS - 1:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            meter = MemoryMeter(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "wait"):
        optimizer.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return meter.peak_bytes()


def _ddp(device: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(_model(device), bucket_cap_mb=4, gradient_as_bucket_view=True)


def _plain(device: torch.device) -> tuple[nn.Module, Any]:
    ddp = _ddp(device)
    return ddp, torch.optim.AdamW(ddp.parameters(), fused=True)


def _stepped(device: torch.device, **options: Any) -> tuple[nn.Module, Any]:
    ddp = _ddp(device)
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), fused=True))
    chained(AllReduce(), Step(optimizer, **options)).register(ddp)
    return ddp, optimizer


def _sharded(device: torch.device) -> tuple[nn.Module, Any]:
    ddp = _ddp(device)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, fused=True)
    chained(ZeroStep(zero)).register(ddp)
    return ddp, zero


@dataclass(frozen=True)
class UpdatesAddLittle:
    """An update in backward takes at most a few buckets more than plain DDP; a sharded one half of the state less."""

    def __call__(self, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
        parameter_bytes = sum(parameter.nbytes for parameter in _model(device).parameters())
        builds = {
            "plain DDP": lambda: _plain(device),
            "Step": lambda: _stepped(device),
            "Step, deferred": lambda: _stepped(device, deferred=True),
            "ZeroStep": lambda: _sharded(device),
        }
        peaks = {name: _peak_bytes(device, build, 16) for name, build in builds.items()}
        figures = {"parameter_bytes": parameter_bytes, **peaks}
        if device.type == "cuda":
            assert peaks["Step"] <= peaks["plain DDP"] + parameter_bytes // 2, figures
            assert peaks["Step, deferred"] <= peaks["plain DDP"] + parameter_bytes // 2, figures
            # Half of two moments is a whole copy of the parameters; its chunks of gradients and of new parameters cost.
            assert peaks["ZeroStep"] <= peaks["plain DDP"] - parameter_bytes // 4, figures
        return figures


def _offload(rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Activations that lie on the CPU are not on the GPU."""

    def build(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Any]:
        model = _model(device, wrap)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    # On the CPU there is nothing to see, but that it runs.
    batch = 4096 if device.type == "cuda" else 16
    peaks = {
        "kept": _peak_bytes(device, lambda: build(lambda module: module), batch),
        "offloaded": _peak_bytes(device, lambda: build(offload_wrapper), batch),
    }
    if device.type == "cuda":
        assert peaks["offloaded"] < 0.8 * peaks["kept"], peaks
    return peaks


def memory_checks() -> list[Check]:
    return [
        Check(name="memory: updates in backward", topic="memory", run=UpdatesAddLittle()),
        Check(name="memory: offloaded activations", topic="memory", run=_offload, ranks=1),
    ]
