"""Draws docs/images/lifecycle.png and prints the table of docs/reports/phases.md, both from the code's transitions."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from overlap.optim.lifecycle import TRANSITIONS, Phase, Refusal

PHASES = tuple(Phase)
Words = tuple[str, str]
"""What a cell says, and the kind of its transition."""
COLORS = {"same": "#eef1f4", "moves": "#cfe8d5", "refused": "#f6c9c4"}


def cell(outcome: Phase | Refusal, phase: Phase) -> Words:
    if isinstance(outcome, Refusal):
        return ("error" if outcome.then is None else f"error → {outcome.then.value}"), "refused"
    return outcome.value, "same" if outcome is phase else "moves"


def rows() -> dict[str, list[Words]]:
    """The cells of each event; two events have no entry of their own in the code."""
    cells = {event.value: [cell(outcomes[phase], phase) for phase in PHASES] for event, outcomes in TRANSITIONS.items()}
    # DDP calls no hook under no_sync: gradients add up, and whoever looks at them next finds them changed.
    cells["backward under no_sync"] = [(phase.value, "same") for phase in PHASES]
    # Which phase follows is the form's own.
    cells["all buckets through"] = [("*", "moves") if phase is Phase.BACKWARD else ("", "same") for phase in PHASES]
    return cells


def table() -> str:
    """The transitions as Markdown."""
    lines = [
        "| call | " + " | ".join(f"**{phase.value}**" for phase in PHASES) + " |",
        "| --- |" + " --- |" * len(PHASES),
    ]
    for event, cells in rows().items():
        lines.append(f"| {event} | " + " | ".join(words or "-" for words, _ in cells) + " |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """The transitions as a picture."""
    count = len(rows())
    figure, axes = plt.subplots(figsize=(11, 0.52 * (count + 1.4)))
    axes.set(xlim=(-1.75, len(PHASES)), ylim=(count, -1.2))
    axes.axis("off")
    for column, phase in enumerate(PHASES):
        axes.text(column + 0.5, -0.45, phase.value, ha="center", va="center", fontweight="bold", fontsize=11)
    for row, (event, cells) in enumerate(rows().items()):
        axes.text(-0.1, row + 0.5, event, ha="right", va="center", fontsize=10)
        for column, (words, kind) in enumerate(cells):
            axes.add_patch(plt.Rectangle((column + 0.03, row + 0.06), 0.94, 0.88, color=COLORS[kind], lw=0))
            axes.text(column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=9)
    for place, (kind, words) in enumerate(
        (("same", "stays"), ("moves", "goes to another phase"), ("refused", "an error, with what to do"))
    ):
        axes.add_patch(plt.Rectangle((-1.7 + 2.4 * place, -1.15), 0.22, 0.32, color=COLORS[kind], lw=0))
        axes.text(-1.4 + 2.4 * place, -0.99, words, va="center", fontsize=9)
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "lifecycle.png")
    print(table())
