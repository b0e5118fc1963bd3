"""Pictures of what the parts before have found, where matplotlib is there."""

from __future__ import annotations

import importlib.util

from benchmarks.gpu.given import Given, Skipped
from benchmarks.gpu.report import PartReport, Report

_RATIOS = "ratios.png"


def cases(given: Given) -> list[str]:
    return ["ratios"]


def run(case: str, given: Given) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Skipped("matplotlib is not installed")
    report = Report.load(given.folder / "report.json")
    found = next((part for part in report.parts if part.name == "ratios" and part.data), None)
    if found is None:
        raise Skipped("no step was timed")
    _draw(found, report, given)
    given.file(_RATIOS)


def _draw(found: PartReport, report: Report, given: Given) -> None:
    """For each model and link a bar a variant: its ratio to the baseline, with quartiles."""
    # Without a window system: these machines have none.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = [tuple(key.split("|")) for key in found.data]
    models, variants, links = (list(dict.fromkeys(key[place] for key in keys)) for place in range(3))
    links.sort(key=float)
    size_inches = 3.4 + 2.6 * len(links), 1.2 + (0.5 + 0.27 * len(variants)) * len(models)
    figure = Figure(figsize=size_inches, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(models), len(links), squeeze=False, sharey=True)
    for model, row in zip(models, rows, strict=True):
        for link, axes in zip(links, row, strict=True):
            axes.axvline(1.0, color="#222222", lw=1)
            for place, variant in enumerate(variants):
                figures = found.data.get(f"{model}|{variant}|{link}")
                if figures is None:
                    continue
                color = "#2a7f9e" if variant.startswith("overlap-") else "#c9a66b"
                axes.barh(place, figures["ratio"], color=color, zorder=2)
                unit = figures["ratio"] / figures["median_ms"]
                spread = [figures["p25_ms"] * unit, figures["p75_ms"] * unit]
                axes.plot(spread, [place] * 2, color="#222222", lw=2, zorder=3)
                axes.text(figures["ratio"], place, f" {figures['ratio']:.2f}", va="center", fontsize=7)
            axes.set_title(f"{model}, {link} Gbit/s", fontsize=9, loc="left")
            axes.set_yticks(range(len(variants)), variants, fontsize=8)
            axes.set_xlim(0, 1.15 * max(one["ratio"] for key, one in found.data.items() if key.endswith(f"|{link}")))
            axes.spines[["top", "right"]].set_visible(False)
        row[0].invert_yaxis()
    machine = next((part.data for part in report.parts if part.name == "machine"), {})
    on = machine.get("name", "") if report.device == "cuda" else "a CPU in the GPU's place"
    what = f"{given.sizes.simulated_ranks} ranks on SIMULATED links; {on}"
    figure.suptitle(f"Step time as a part of plain DDP's with fused AdamW; {what}", fontsize=10)
    figure.savefig(given.folder / _RATIOS)
