"""From what the ranks found to the rows that are shown and saved."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overlap.bench.floor import StepProfile, floor_ms
from overlap.bench.measurements import Measurements
from overlap.bench.proc import proc_bytes, proc_value
from overlap.bench.registry import registry
from overlap.bench.settings import FILES, RunConfig
from overlap.bench.variant import COMPUTE_ONLY

OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant, as it stands in the JSON. What was not measured is None, and `status` says why.

    `bytes_sent_per_step` and `peak_memory_bytes` are those of the rank that has most of them; times are of each
    step's slowest rank. `ratio` is the median over the baseline's, `ratio_to_16bit` that over PyTorch's fp16 hook's,
    where it was timed too, and `exposed_ms` the median less that of compute-only, all of the same timing.
    """

    variant: str
    median_ms: float | None = None
    p25_ms: float | None = None
    p75_ms: float | None = None
    ratio: float | None = None
    ratio_to_16bit: float | None = None
    baseline: str
    bytes_sent_per_step: int | None = None
    peak_memory_bytes: int | None = None
    exposed_ms: float | None = None
    floor_ms: float | None = None
    status: str

    @property
    def score(self) -> float | None:
        """How much of the step the floor explains; 1 would be as fast as can be."""
        return None if self.floor_ms is None or not self.median_ms else self.floor_ms / self.median_ms


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a run reports; `save` writes it as the JSON that docs/benchmarks.md describes."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        raw = json.loads(Path(path).read_text())
        return cls(machine=raw["machine"], settings=raw["settings"], rows=tuple(Row(**row) for row in raw["rows"]))


def make_report(config: RunConfig, measurements: Measurements, machine: dict[str, Any]) -> Report:
    link_bytes_per_s = min(one.link_bytes_per_s for one in measurements.profiles)
    settings = {key: value for key, value in asdict(config.settings).items() if key not in FILES}
    settings |= {
        "variants": list(config.variants),
        "link": config.link,
        "bandwidth_bytes_per_s": config.settings.bandwidth_bytes_per_s,
        # What an all-reduce got, by the bytes each rank sends: on loopback, the floors rest on it.
        "measured_bytes_per_s": round(link_bytes_per_s),
        "simulated": config.link == "simulated",
        "samples": {name: len(timing[name]) for name in config.variants if (timing := measurements.timing_of(name))},
    }
    bandwidth_bytes_per_s = link_bytes_per_s
    if config.link in ("namespaces", "simulated"):
        bandwidth_bytes_per_s = config.settings.bandwidth_bytes_per_s or link_bytes_per_s
    slowest = max((one.step for one in measurements.profiles), key=lambda step: step.compute_ms)
    rows = tuple(_row(config, measurements, name, slowest, bandwidth_bytes_per_s) for name in config.variants)
    return Report(machine=machine, settings=settings, rows=rows)


def _row(
    config: RunConfig, measurements: Measurements, name: str, profile: StepProfile, bandwidth_bytes_per_s: float
) -> Row:
    variant = registry()[name]
    baseline = variant.baseline_name(config.settings)
    timing = measurements.timing_of(name)
    if timing is None:
        return Row(variant=name, baseline=baseline, status=measurements.failures.get(name, "not run: out of time"))
    trials = measurements.trials[name]
    sent_bytes = max(one.sent_bytes_per_step for one in trials)
    p25_ms, median_ms, p75_ms = quartiles(timing[name])
    ratio = ratio_to_16bit = exposed_ms = floor = None
    if baseline in timing:
        ratio = median_ms / statistics.median(timing[baseline])
    if (baseline_16bit := variant.baseline_16bit_name(config.settings)) in timing:
        ratio_to_16bit = median_ms / statistics.median(timing[baseline_16bit])
    if COMPUTE_ONLY in timing:
        compute_ms = statistics.median(timing[COMPUTE_ONLY])
        exposed_ms = median_ms - compute_ms
        floor = floor_ms(
            variant.floor,
            profile.scaled_to(compute_ms),
            optimizer=variant.optimizer_name(config.settings),
            sent_bytes=sent_bytes,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        )
    return Row(
        variant=name,
        median_ms=_rounded(median_ms),
        p25_ms=_rounded(p25_ms),
        p75_ms=_rounded(p75_ms),
        ratio=_rounded(ratio, 4),
        ratio_to_16bit=_rounded(ratio_to_16bit, 4),
        baseline=baseline,
        bytes_sent_per_step=round(sent_bytes),
        peak_memory_bytes=max(one.peak_memory_bytes for one in trials),
        exposed_ms=_rounded(exposed_ms),
        floor_ms=_rounded(floor),
        status=OK,
    )


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 25th, 50th and 75th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    lower, middle, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return lower, middle, upper


def describe_machine() -> dict[str, Any]:
    """What a reader needs to know to place absolute times."""
    machine: dict[str, Any] = {
        "cpu": proc_value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": proc_bytes("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # Before the run: other work on the machine shows up in the times.
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        machine["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return machine


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
