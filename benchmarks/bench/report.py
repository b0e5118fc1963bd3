"""The rows of a benchmark: made of the ranks' measurements, saved as JSON, shown as tables."""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.timing import Measurements, StepProfile
from benchmarks.bench.variants import COMPUTE_ONLY, Variant, registry
from benchmarks.measuring import quartiles
from benchmarks.pages import in_columns, in_markdown
from benchmarks.ranks import Network

OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant, as it stands in the JSON. Where it was not measured the figures are None, and `status` says why.

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
    """The results of a run; `save` writes the JSON that docs/benchmarks.md describes."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        raw = json.loads(Path(path).read_text())
        return cls(machine=raw["machine"], settings=raw["settings"], rows=tuple(Row(**row) for row in raw["rows"]))


def make_report(settings: Namespace, network: Network, variants: tuple[str, ...], measurements: Measurements) -> Report:
    link_bytes_per_s = min(one.link_bytes_per_s for one in measurements.profiles)
    shown = {key: value for key, value in vars(settings).items() if key not in ("json", "markdown", "show")}
    shown |= {
        "variants": list(variants),
        "link": network.kind,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
        # The speed of an all-reduce, by the bytes each rank sends: on loopback, the floors rest on it.
        "measured_bytes_per_s": round(link_bytes_per_s),
        "samples": {name: len(timing[name]) for name in variants if (timing := measurements.timing_of(name))},
    }
    if network.kind == "namespaces":
        link_bytes_per_s = network.bandwidth_bytes_per_s or link_bytes_per_s
    rows = tuple(_row(settings, measurements, name, link_bytes_per_s) for name in variants)
    return Report(machine=measurements.profiles[0].machine, settings=shown, rows=rows)


def _row(settings: Namespace, measurements: Measurements, name: str, link_bytes_per_s: float) -> Row:
    variant = registry()[name]
    baseline = variant.baseline_name(settings)
    timing = measurements.timing_of(name)
    if timing is None:
        return Row(variant=name, baseline=baseline, status=measurements.failures.get(name, "not run: out of time"))
    medians = {each: statistics.median(samples) for each, samples in timing.items()}
    p25_ms, median_ms, p75_ms = quartiles(timing[name])
    sent_bytes = max(one.sent_bytes_per_step for one in measurements.trials[name])
    exposed_ms = floor = None
    if COMPUTE_ONLY in medians:
        exposed_ms = median_ms - medians[COMPUTE_ONLY]
        slowest = max((one.step for one in measurements.profiles), key=lambda step: step.compute_ms)
        profile = slowest.scaled_to(medians[COMPUTE_ONLY])
        update_ms = profile.update_ms[variant.optimizer_name(settings)]
        floor = floor_ms(variant, profile, update_ms, 1000 * sent_bytes / link_bytes_per_s)
    return Row(
        variant=name,
        median_ms=_rounded(median_ms),
        p25_ms=_rounded(p25_ms),
        p75_ms=_rounded(p75_ms),
        ratio=_ratio(median_ms, medians.get(baseline)),
        ratio_to_16bit=_ratio(median_ms, medians.get(variant.baseline_16bit_name(settings))),
        baseline=baseline,
        bytes_sent_per_step=round(sent_bytes),
        peak_memory_bytes=max(one.peak_memory_bytes for one in measurements.trials[name]),
        exposed_ms=_rounded(exposed_ms),
        floor_ms=_rounded(floor),
        status=OK,
    )


def floor_ms(variant: Variant, profile: StepProfile, update_ms: float, sending_ms: float) -> float:
    """The bound for a variant whose bytes take `sending_ms` on the link; each bucket has its share of them."""
    if variant.floor == "compute":
        return profile.compute_ms
    if variant.floor == "streamed":
        return max(profile.compute_ms + update_ms, sending_ms)
    total_bytes = sum(profile.bucket_bytes)
    reduced_ms = 0.0
    for ready_ms, bucket_bytes in zip(profile.ready_ms, profile.bucket_bytes, strict=True):
        reduced_ms = max(reduced_ms, ready_ms) + sending_ms * bucket_bytes / total_bytes
    last_update_ms = update_ms * profile.bucket_bytes[-1] / total_bytes
    return max(profile.compute_ms, reduced_ms) + last_update_ms


def _ratio(value: float, to: float | None) -> float | None:
    return None if to is None else round(value / to, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


_HEADINGS = (
    "variant", "ms a step", "p25 - p75", "ratio", "to fp16", "sent MB", "peak MB", "exposed ms", "floor ms", "score",
    "baseline",
)  # fmt: skip


def table(report: Report) -> str:
    """The table in columns, the failures in full below it, and the machine that the numbers were taken on."""
    columns = in_columns([_HEADINGS, *map(_cells, report.rows)], left=(0, len(_HEADINGS) - 1))
    failures = [f"{row.variant}: {row.status}" for row in report.rows if row.status != OK]
    return "\n".join([title(report), "", columns, *failures, "", _footnote(report)])


def markdown(report: Report) -> str:
    """The table for a document, with failures in the column of times and the footnote below."""
    rows = [
        _cells(row) if row.median_ms is not None else [row.variant, row.status, *[""] * 8, row.baseline]
        for row in report.rows
    ]
    # An empty column is left out.
    kept = [place for place in range(len(_HEADINGS)) if any(cells[place] not in ("", "-") for cells in rows)]
    for cells in rows:
        cells[0] = f"**{cells[0]}**" if cells[0].startswith("overlap-") else cells[0]
    lines = in_markdown([[cells[place] for place in kept] for cells in (_HEADINGS, *rows)], left=(0, len(kept) - 1))
    return "\n".join([f"**{title(report)}**", "", lines, "", _footnote(report).replace("\n", " "), ""])


def title(report: Report) -> str:
    """The run on one line."""
    settings = report.settings
    ranks, batch_size = settings["ranks"], settings["batch_size"]
    parts = [settings["model"], f"batch {batch_size}", f"{ranks} ranks", _link_in_words(settings)]
    if settings.get("gradient_as_bucket_view"):
        parts.append("gradients as views of the buckets")
    return ", ".join(parts)


def _link_in_words(settings: dict[str, Any]) -> str:
    measured = f"{8 * settings['measured_bytes_per_s'] / 1e9:.2g} Gbit/s measured"
    if settings["link"] == "namespaces":
        return f"links of {settings['bandwidth']} ({measured})"
    return f"{'loopback' if settings['link'] == 'loopback' else 'NCCL'}, not shaped ({measured})"


def _footnote(report: Report) -> str:
    machine = report.machine
    on = ", ".join(machine.get("gpus", ())) or f"{machine['cpu']}, {machine['cores']} cores"
    return (
        f"Times are of each step's slowest rank, variants taking turns. Sent: per rank and step. Exposed: over "
        f"compute-only. Score: floor / step.\n{on}; torch {machine['torch']}; load {machine['load']}."
    )


def _cells(row: Row) -> list[str]:
    if row.median_ms is None:
        return [row.variant, row.status.partition(":")[0], *[""] * 8, row.baseline]
    return [
        row.variant,
        f"{row.median_ms:.1f}",
        f"{row.p25_ms:.1f} - {row.p75_ms:.1f}",
        _number(row.ratio, "{:.3f}"),
        _number(row.ratio_to_16bit, "{:.3f}"),
        _number(row.bytes_sent_per_step, "{:.2f}", 1e6),
        _number(row.peak_memory_bytes, "{:.0f}", 1e6),
        _number(row.exposed_ms, "{:.1f}"),
        _number(row.floor_ms, "{:.1f}"),
        _number(row.score, "{:.0%}"),
        row.baseline,
    ]


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value / unit)
