"""`python -m soak.slopes`: does anything grow in 20,000 steps of each form? Exit status 0 only if nothing does.

Lines are fitted by least squares. A slope counts where it is more than three of its standard errors, and where what it
adds over the run is more than the measure's bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .forms import FORMS
from .long_run import Sample, samples_of
from .report import write_into

STEPS = 20_000
_SAMPLES = 200
_SIGNIFICANT = 3.0  # Standard errors.
_WARM_UP = 0.2  # The part of the run that is left out: caches fill, buckets are cut anew.
_MOST_CORRELATED = 0.95


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Something that must not grow."""

    name: str
    unit: str
    scale: float = 1.0  # From a sample's unit.
    bound: float  # Over the whole run; in `unit`, or as a part of the mean.
    is_relative: bool = False

    def matters(self, growth: float, mean: float) -> bool:
        return growth > self.bound * (mean if self.is_relative else 1.0)

    @property
    def bound_in_words(self) -> str:
        return f"{self.bound:.0%}" if self.is_relative else f"{self.bound:g} {self.unit}".strip()


MEASURES = (
    Measure(name="memory", unit="KiB", scale=1 / 1024, bound=2048),
    Measure(name="Python blocks", unit="", bound=400),
    Measure(name="threads", unit="", bound=0.5),
    Measure(name="descriptors", unit="", bound=0.5),
    Measure(name="store keys", unit="", bound=4),
    Measure(name="CPU time", unit="of plain DDP's", bound=0.1, is_relative=True),
)


@dataclass(frozen=True, kw_only=True)
class Slope:
    """A line through samples: how much more there is after a step, with its standard error."""

    mean: float
    per_step: float
    error: float

    @property
    def is_significant(self) -> bool:
        return self.per_step > _SIGNIFICANT * self.error


def fitted(steps: Sequence[float], values: Sequence[float]) -> Slope:
    """The line of least squares.

    Its standard error allows for residuals of which one is like the one before, as those of a process's memory are: by
    their first correlation there are fewer independent ones.
    """
    line = statistics.linear_regression(steps, values)
    residuals = [value - line.slope * step - line.intercept for step, value in zip(steps, values, strict=True)]
    squares = sum(residual**2 for residual in residuals)
    center = statistics.fmean(steps)
    error = math.sqrt(squares / (len(steps) - 2) / sum((step - center) ** 2 for step in steps))
    neighbours = sum(one * other for one, other in itertools.pairwise(residuals))
    correlation = min(max(neighbours / squares, 0.0), _MOST_CORRELATED) if squares else 0.0
    widened = error * math.sqrt((1 + correlation) / (1 - correlation))
    return Slope(mean=statistics.fmean(values), per_step=line.slope, error=widened)


def judged(form: str, ranks: Sequence[Sequence[Sample]], measures: Iterable[Measure] = MEASURES) -> dict[str, Any]:
    """What a long run of `form` has shown, as plain values: for each measure the rank on which it grows most."""
    found: dict[str, Any] = {"form": form, "steps": int(ranks[0][-1]["step"]), "measures": {}}
    found["step_ms"] = 1000 * statistics.median(sample["time"] for samples in ranks for sample in samples)
    for measure in measures:
        rows = []
        for rank, samples in enumerate(ranks):
            kept = samples[int(_WARM_UP * len(samples)) :]
            slope = fitted(
                [sample["step"] for sample in kept], [measure.scale * sample[measure.name] for sample in kept]
            )
            growth = slope.per_step * found["steps"]
            grows = slope.is_significant and measure.matters(growth, slope.mean)
            rows.append(
                {
                    "rank": rank,
                    "mean": slope.mean,
                    "per_1000_steps": 1000 * slope.per_step,
                    "standard_error": 1000 * slope.error,
                    "over_the_run": growth,
                    "grows": grows,
                }
            )
        found["measures"][measure.name] = max(rows, key=lambda row: (row["grows"], row["per_1000_steps"]))
    return found


def growing(found: dict[str, Any]) -> list[str]:
    """What grows in a long run, in words."""
    return [
        f"{name} on rank {row['rank']}: {row['per_1000_steps']:+.3g} ± {row['standard_error']:.2g} in 1000 steps"
        for name, row in found["measures"].items()
        if row["grows"]
    ]


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each form and a column for each measure."""
    steps = sorted({run["steps"] for run in runs})
    flat = sum(not growing(run) for run in runs)
    names = [f"{measure.name}{f', {measure.unit}' if measure.unit else ''}" for measure in MEASURES]
    bounds = ", ".join(f"{measure.name} {measure.bound_in_words}" for measure in MEASURES)
    first = (
        f"{flat} of {len(runs)} forms are flat over {' or '.join(f'{each:,}' for each in steps)} steps on two ranks. "
        "In a cell: the slope in 1,000 steps ± its standard error, on the rank where it is larger. In bold: what "
        f"grows, by more than three standard errors and by more than this over the run: {bounds}."
    )
    lines = [
        first,
        "",
        "| | ms a step | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * (1 + len(names)),
    ]
    for run in runs:
        cells = " | ".join(_cell(run["measures"][measure.name]) for measure in MEASURES)
        lines.append(f"| {run['form']} | {run['step_ms']:.1f} | {cells} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    text = f"{_short(row['per_1000_steps'])} ± {_short(row['standard_error'])}"
    return f"**{text}**" if row["grows"] else text


def _short(value: float) -> str:
    return "0" if abs(value) < 5e-4 else f"{value:.2g}"


def _read(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The runs of several files, by form; of two the later one."""
    return {run["form"]: run for path in paths if path.exists() for run in json.loads(path.read_text())}


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.slopes", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--form", action="append", choices=list(FORMS), help="only this one; may be given again")
    parser.add_argument("--out", type=Path, default=Path("overlap-soak"), help="folder of what was seen")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="slopes.json of other runs")
    parser.add_argument("--report", action="store_true", help="no steps: only the table of what is there")
    parser.add_argument("--into", type=Path, help="a page that gets the table, between two comments")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "slopes.json"
    runs = _read([*options.merge, kept])
    for form in [] if options.report else options.form or list(FORMS):
        ranks = samples_of(form, steps=options.steps, samples=min(_SAMPLES, options.steps // 20))
        runs[form] = judged(form, ranks)
        print(f"{form}: {'; '.join(growing(runs[form])) or 'flat'}, {runs[form]['step_ms']:.1f} ms a step", flush=True)
        kept.write_text(json.dumps(list(runs.values()), indent=1))
        with (options.out / "slopes-samples.jsonl").open("a") as file:
            file.write(json.dumps({"form": form, "ranks": ranks}) + "\n")
    ordered = [runs[form] for form in FORMS if form in runs]
    text = markdown(ordered)
    (options.out / "slopes.md").write_text(text + "\n")
    if options.into is not None:
        write_into(options.into, text, what="slopes")
    return 1 if any(growing(run) for run in ordered) else 0


if __name__ == "__main__":
    sys.exit(_main())
