"""Draws the figures in docs/images that are made from tables of the pages."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent

WIDTH, LEFT, RIGHT, TOP, ROW = 640, 16, 122, 56, 64
STYLE = """
  text { font: 22px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 20px; fill: #59636e }
  .ground { fill: #ffffff } .reference { stroke: #59636e; stroke-width: 2; stroke-dasharray: 5 5 }
  .ddp { stroke: #818b98 } .torch { stroke: #bf8700 } .first { stroke: #0969da } .second { stroke: #1a7f37 }
  .range { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 } .ground { fill: #151b23 } .reference { stroke: #9198a1 }
    .ddp { stroke: #656c76 } .torch { stroke: #9e6a03 } .first { stroke: #1f6feb } .second { stroke: #238636 }
    .range { stroke: #f0f6fc }
  }"""


@dataclass(frozen=True)
class Line:
    """One line of a figure: its length is ``value``, and a thin line over its end goes from ``low`` to ``high``."""

    kind: str
    label: str
    value: float
    low: float
    high: float


def cells(page: str, heading: str, name: str) -> list[str]:
    """The cells of the row called ``name`` in the first table after ``heading``."""
    table = (DOCS / page).read_text().partition(heading)[2].partition("\n\n|")[2].partition("\n\n")[0]
    (row,) = re.findall(rf"^\| [*`]*{name}[*`]* \| (.*) \|$", table, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def line(page: str, heading: str, name: str, kind: str, label: str) -> Line:
    """A row of a table: its first cell is the value, its second ``low - high`` where it was measured several times."""
    value, spread, *_ = cells(page, heading, name)
    low, high = map(float, spread.split(" - ") if " - " in spread else (value, value))
    return Line(kind, label, float(value), low, high)


def picture(title: str, lines: list[Line], unit: str, reference: tuple[str, float] | None = None) -> str:
    """The figure as SVG, with labels at its lines, for a light and a dark ground."""
    longest = max(one.high for one in lines)
    height = TOP + ROW * len(lines) + (38 if reference else 10)

    def x(value: float) -> int:
        return round(LEFT + value / longest * (WIDTH - LEFT - RIGHT))

    def shown(value: float) -> str:
        return f"{value:.{0 if longest > 100 else 1}f} {unit}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{title}</title>\n<style>{STYLE}\n</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text class="small" x="{LEFT}" y="34">{title}</text>',
    ]
    for number, one in enumerate(lines):
        top = TOP + ROW * number
        y = top + 38
        parts += [
            f'<text x="{LEFT}" y="{top + 22}">{one.label}</text>',
            f'<line class="{one.kind}" x1="{LEFT}" x2="{x(one.value)}" y1="{y}" y2="{y}" stroke-width="16"/>',
            f'<line class="range" x1="{x(one.low)}" x2="{x(one.high)}" y1="{y}" y2="{y}" stroke-width="2"/>',
            f'<text x="{x(one.high) + 10}" y="{y + 7}">{shown(one.value)}</text>',
        ]
    if reference is not None:
        words, value = reference
        bottom = TOP + ROW * len(lines)
        parts += [
            f'<line class="reference" x1="{x(value)}" x2="{x(value)}" y1="{TOP + 4}" y2="{bottom + 4}"/>',
            f'<text class="small" x="{x(value)}" y="{bottom + 24}" text-anchor="middle">{words}: {shown(value)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def curves(title: str, page: str, heading: str, names: dict[str, tuple[str, str]]) -> str:
    """Operators against ranks, from the table of ``page`` after ``heading``, on logarithmic axes: the row of each of
    ``names``, drawn in its kind and with its label at the end."""
    height, bottom, ranks = 420, 370, (8, 64, 512, 4096)

    def x(number: int) -> int:
        return round(LEFT + 44 + (WIDTH - LEFT - 280) * math.log(number / 8) / math.log(512))

    def y(value: float) -> int:
        return round(bottom - (bottom - TOP - 30) * math.log(value) / math.log(2000))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{title}</title>\n<style>{STYLE}\n</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text class="small" x="{LEFT}" y="34">{title}</text>',
        *(f'<text class="small" x="{x(one)}" y="{bottom + 34}" text-anchor="middle">{one}</text>' for one in ranks),
        *(f'<text class="small" x="{LEFT}" y="{y(one) + 7}">{one}</text>' for one in (10, 100, 1000)),
    ]
    for name, (kind, label) in names.items():
        found = [float(value.replace(",", "")) for value in cells(page, heading, name)[1].split(" / ")]
        values = found * len(ranks) if len(found) == 1 else found
        points = [(x(number), y(value)) for number, value in zip(ranks, values, strict=False)]
        drawn = " ".join(f"{across},{up}" for across, up in points)
        across, up = points[-1]
        parts += [
            f'<polyline class="{kind}" points="{drawn}" fill="none" stroke-width="4"/>',
            f'<text x="{across + 10}" y="{up + 7}">{label}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def figures() -> dict[str, str]:
    scale = ("reports/scale.md", "<!-- scale -->")
    return {
        **bars(),
        "scale.svg": curves(
            "Operators a bucket against ranks, simulated",
            *scale,
            {
                "AllReduce": ("ddp", "AllReduce()"),
                "ZeroStep": ("first", "ZeroStep(zero)"),
                re.escape("Quantize(Int8())"): ("second", "Quantize(Int8())"),
            },
        ),
    }


def bars() -> dict[str, str]:
    """What each file is to contain."""
    step = ("reports/step-times.md", "## The run of the front page")
    race = ("reports/races.md", "**digits, 2 ranks, links of 100mbit")
    peak = ("reports/memory.md", "**GPT, 98 M parameters (373 MiB), AdamW**")
    link = ("gpus.md", "**A slow link**")
    compute = float(cells(*step, "compute-only")[0])
    return {
        "slow-link.svg": picture(
            "A step of a GPT (355 M) on an H100, 2 ranks over TCP",
            [
                line(*link, "DDP", "ddp", "DDP"),
                line(*link, "PyTorch's bf16 hook", "torch", "PyTorch's bf16 hook"),
                line(*link, re.escape("Quantize(Int8())"), "first", "Quantize(Int8())"),
            ],
            "ms",
        ),
        "step-times.svg": picture(
            "A step of ResNet-18 (11.7 M), 2 CPU processes, 1 Gbit/s",
            [
                line(*step, "ddp-sgd", "ddp", "DDP"),
                line(*step, "torch-fp16", "torch", "PyTorch's fp16 hook"),
                line(*step, "overlap-quantize8", "first", "Quantize(Int8())"),
                line(*step, "overlap-powersgd-r4", "second", "PowerSGD(rank=4)"),
            ],
            "ms",
            ("computing alone", compute),
        ),
        "time-to-accuracy.svg": picture(
            "To 95 % accuracy: ResNet (0.7 M), 100 Mbit/s, 3 seeds",
            [
                line(*race, "ddp", "ddp", "DDP"),
                line(*race, "torch-fp16", "torch", "PyTorch's fp16 hook"),
                line(*race, "overlap-int8", "first", "Quantize(Int8())"),
                line(*race, "overlap-powersgd-r4", "second", "PowerSGD(rank=4)"),
            ],
            "s",
        ),
        "memory.svg": picture(
            "Above activations: GPT (98 M), AdamW, 2 CPU processes",
            [
                line(*peak, "plain DDP", "ddp", "DDP"),
                line(*peak, "PyTorch's `ZeroRedundancyOptimizer`, views", "torch", "PyTorch's ZeRO"),
                line(*peak, "`ZeroStep`, views", "first", "ZeroStep(zero)"),
                line(*peak, re.escape("ZeroStep(release_gradients=True)"), "second", "... release_gradients=True"),
            ],
            "MiB",
        ),
    }


if __name__ == "__main__":
    for name, text in figures().items():
        (DOCS / "images" / name).write_text(text)
