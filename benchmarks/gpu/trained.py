"""Models that are trained on a simulated link, sized for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.bench.settings import Settings
from benchmarks.bench.variants import TrainingLoop, TrainingSetup, Variant, registry
from benchmarks.gpu.given import Given
from benchmarks.gpu.world import device_of
from benchmarks.simulated import SIMULATED_BACKEND, SimulatedLink, register_simulated_backend
from overlap._torch.device import synchronize

__all__ = ["TITLES", "Trainee", "bytes_per_s", "open_link"]

_OPTIMIZER = "adamw-fused"
_LATENCY_US = 20.0


@dataclass(frozen=True, kw_only=True)
class _Model:
    title: str
    workload: str
    batch_size: int
    bucket_cap_mb: float | None = None


_MODELS = {
    "resnet50": _Model(
        title="ResNet-50, 128 images of 224 x 224, bf16 autocast, channels last",
        workload="resnet50-224",
        batch_size=128,
    ),
    "gpt-350m": _Model(
        title="GPT of 355 M parameters, 8 sequences of 1,024 tokens, bf16 autocast",
        workload="gpt-350m",
        batch_size=8,
    ),
    "resnet-small": _Model(
        title="ResNet-18 of an eighth of its width, 2 images of 32 x 32",
        workload="resnet-small",
        batch_size=2,
        bucket_cap_mb=0.2,
    ),
    "gpt-small": _Model(
        title="GPT of 0.1 M parameters, 4 sequences of 32 tokens",
        workload="gpt-small",
        batch_size=4,
        bucket_cap_mb=0.1,
    ),
}
TITLES = {name: model.title for name, model in _MODELS.items()}


def bytes_per_s(gbit: float) -> float:
    """Of a link of so many Gbit/s."""
    return gbit * 1e9 / 8


def open_link(given: Given) -> SimulatedLink:
    """Joins the simulated ranks, all of them this process, by a link so fast that it costs nothing."""
    link = SimulatedLink(bandwidth_bytes_per_s=1e15, latency_s=_LATENCY_US / 1e6)
    register_simulated_backend(link)
    dist.init_process_group(
        SIMULATED_BACKEND,
        store=dist.FileStore(str(given.scratch / "simulated"), 1),
        rank=0,
        world_size=given.sizes.simulated_ranks,
    )
    return link


@dataclass(frozen=True)
class Trainee:
    """A model that variants are built of, on the device."""

    name: str
    device: torch.device

    @classmethod
    def of(cls, name: str, given: Given) -> Trainee:
        torch.backends.cudnn.benchmark = True
        return cls(name, device_of(given))

    def setup(self, variant: Variant) -> TrainingSetup:
        """The setup that a variant is built from."""
        model = _MODELS[self.name]
        settings = Settings(
            ranks=dist.get_world_size(),
            model=model.workload,
            optimizer=_OPTIMIZER,
            batch_size=model.batch_size,
            bucket_cap_mb=model.bucket_cap_mb,
            gradient_as_bucket_view=True,
            device="cuda" if self.device.type == "cuda" else "cpu",
        )
        return TrainingSetup(
            settings=settings,
            device=self.device,
            is_simulated=True,
            optimizer_name=variant.optimizer_name(settings),
        )

    def build(self, name: str, *, warmup_steps: int = 3) -> TrainingLoop:
        """The training loop of a variant, warmed up."""
        variant = registry()[name]
        loop = variant.build(self.setup(variant))
        for _ in range(warmup_steps):
            loop.step()
        loop.finish()
        self.synchronize()
        return loop

    def synchronize(self) -> None:
        """Waits for the device."""
        synchronize(self.device)
