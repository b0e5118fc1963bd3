"""Form by fault: how many trials, how many clean, the slowest error, how many resumed exactly."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from .faults import FAULTS
from .forms import FORMS

Trial = dict[str, Any]


def read(path: Path) -> list[Trial]:
    """The trials of a campaign; of two with one seed the later one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({trial["seed"]: trial for trial in map(json.loads, lines)}.values())


def markdown(trials: list[Trial]) -> str:
    """A line for each fault and a column for each form: clean / trials, and the slowest error in seconds."""
    cells = defaultdict(list)
    for trial in trials:
        cells[trial["form"], trial["fault"]].append(trial)
    ours = [trial for trial in trials if FORMS[trial["form"]].is_ours]
    forms = [form for form in FORMS if any((form, fault) in cells for fault in FAULTS)]
    first = (
        f"{len(ours)} trials of overlap's forms: {sum(not trial['unclean'] for trial in ours)} clean, "
        f"{sum(trial['resumed_exactly'] for trial in ours)} resumed bit for bit; beside them {len(trials) - len(ours)} "
        "of plain DDP. In a cell: *clean / trials*, and the longest time in seconds from the fault to another rank's "
        "error."
    )
    lines = [first, "", "| fault | " + " | ".join(forms) + " |", "| --- |" + " ---: |" * len(forms)]
    faults = [fault for fault in FAULTS if any((form, fault) in cells for form in forms)]
    lines += [f"| {fault} | {' | '.join(_cell(cells[form, fault]) for form in forms)} |" for fault in faults]
    lines += [f"- {trial['seed']}: {text}" for trial in ours for text in trial["unclean"]]
    return "\n".join(lines)


def _cell(trials: list[Trial]) -> str:
    if not trials:
        return "-"
    slowest_s = max((trial["slowest_s"] for trial in trials if trial["slowest_s"] is not None), default=None)
    clean = sum(not trial["unclean"] for trial in trials)
    return f"{clean}/{len(trials)}" + ("" if slowest_s is None else f", {slowest_s:.1f}")
