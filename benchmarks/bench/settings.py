"""The options of a benchmark, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.link import parse_bandwidth
from benchmarks.models import WORKLOADS
from benchmarks.recipes import Maker
from overlap.errors import ConfigurationError

# A small step keeps random labels from blowing up the weights.
LEARNING_RATE = 1e-4
OPTIMIZERS = {
    "sgd": Maker(torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}),
    "sgd-fused": Maker(torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9, "fused": True}),
    "adamw": Maker(torch.optim.AdamW, {"lr": LEARNING_RATE, "foreach": False}),
    "adamw-fused": Maker(torch.optim.AdamW, {"lr": LEARNING_RATE, "fused": True}),
}
# Where results are saved; not part of the run.
FILES = ("json", "markdown")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run, as given."""

    ranks: int = 2
    # Written as `tc` does, e.g. "1gbit"; None measures on loopback, unshaped.
    bandwidth: str | None = None
    model: str = "resnet18"
    # Of the variants whose name does not say.
    optimizer: str = "sgd"
    batch_size: int = 8
    # Empty: every variant that this backend can run.
    variants: tuple[str, ...] = ()
    # Timed samples per variant; fewer when `time_limit_s` ends the run first.
    steps: int = 20
    warmup_steps: int = 3
    # None leaves it to DDP: 25 MB, and a first bucket of 1 MB, which is only made when no size is given.
    bucket_cap_mb: float | None = None
    # DDP's option of that name, for every variant: gradients are views of the buckets and are not copied.
    gradient_as_bucket_view: bool = False
    # For the whole run, start and end included.
    time_limit_s: float = 420.0
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0
    json: str | None = None
    markdown: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("model", WORKLOADS), ("optimizer", OPTIMIZERS), ("device", ("cpu", "cuda"))):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        # DDP rebuilds its buckets after the first step, and PyTorch's PowerSGD starts at the third.
        for name, least in (("ranks", 2), ("batch_size", 1), ("steps", 1), ("warmup_steps", 3)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}={getattr(self, name)} is too small: at least {least}")
        for name in ("bucket_cap_mb", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} must be positive")
        if self.bandwidth is not None:
            parse_bandwidth(self.bandwidth)
        for name in FILES:
            path = getattr(self, name)
            if path is not None and not Path(path).resolve().parent.is_dir():
                raise ConfigurationError(f"{name}={path!r} lies in a folder that does not exist: create it first")
