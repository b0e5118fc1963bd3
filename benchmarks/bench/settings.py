"""What a benchmark run is asked to do: the options, checked before anything is started."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.link import parse_bandwidth
from overlap.errors import ConfigurationError

MODELS = ("resnet18", "resnet50", "transformer", "gpt-350m", "mlp", "mlp-batchnorm")
OPTIMIZERS = ("sgd", "sgd-fused", "adamw", "adamw-fused")
LinkKind = Literal["namespaces", "loopback", "simulated", "direct"]
# Where results are saved; not part of what was run.
FILES = ("json", "plot", "markdown")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run, as given; `RunConfig` holds what is worked out from them."""

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
    # One process that stands for all ranks, on a link that only exists in its arithmetic.
    simulate: bool = False
    # Of a simulated collective, besides the bytes over the bandwidth.
    latency_us: float = 20.0
    # Two NCCL ranks on one GPU, which NCCL refuses unless it takes them for two hosts.
    share_gpu: bool = False
    seed: int = 0
    json: str | None = None
    plot: str | None = None
    markdown: str | None = None

    def __post_init__(self) -> None:
        self._check_choice("model", MODELS)
        self._check_choice("optimizer", OPTIMIZERS)
        self._check_choice("device", ("cpu", "cuda"))
        self._check_least("ranks", 2)
        self._check_least("batch_size", 1)
        self._check_least("steps", 1)
        # DDP rebuilds its buckets after the first step, and PyTorch's PowerSGD starts at the third.
        self._check_least("warmup_steps", 3)
        for name in ("bucket_cap_mb", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} must be positive")
        if self.latency_us < 0:
            raise ConfigurationError(f"latency_us={self.latency_us} must not be negative")
        self.bandwidth_bytes_per_s  # noqa: B018 - parsing is the check
        if self.simulate and self.bandwidth is None:
            raise ConfigurationError("simulate=True needs a bandwidth to simulate: add for example --bandwidth 10gbit")
        for name in FILES:
            path = getattr(self, name)
            if path is not None and not Path(path).resolve().parent.is_dir():
                raise ConfigurationError(f"{name}={path!r} lies in a folder that does not exist: create it first")

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        return None if self.bandwidth is None else parse_bandwidth(self.bandwidth)

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigurationError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")

    def _check_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigurationError(f"{name}={getattr(self, name)} is too small: at least {least}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every rank is told: the settings, the variants by name, the link, and where to leave results."""

    settings: Settings
    variants: tuple[str, ...]
    folder: str
    link: LinkKind
    # Unix time by which the ranks should be done.
    deadline: float

    @property
    def processes(self) -> int:
        """How many processes there are: one stands for all ranks when the link is simulated."""
        return 1 if self.link == "simulated" else self.settings.ranks

    def save(self) -> Path:
        path = Path(self.folder) / "run.pickle"
        path.write_bytes(pickle.dumps(self))
        return path

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        config: RunConfig = pickle.loads(Path(path).read_bytes())
        return config
