"""Form by fault: how many trials, how many clean, the slowest error, how many resumed exactly."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .faults import FAULTS
from .forms import FORMS


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The trials of several campaigns; of two with one seed the later one."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        if path.exists():
            for line in path.read_text().splitlines():
                trial = json.loads(line)
                found[trial["seed"]] = trial
    return list(found.values())


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The table as plain values."""
    rows = defaultdict(list)
    for trial in trials:
        rows[trial["form"], trial["fault"]].append(trial)
    ours = [trial for trial in trials if FORMS[trial["form"]].is_ours]
    return {
        "trials": len(ours),
        "clean": sum(not trial["unclean"] for trial in ours),
        "resumed exactly": sum(trial["resumed_exactly"] for trial in ours),
        "why": dict(Counter(why for trial in ours for why in {_why(text) for text in trial["unclean"]}).most_common()),
        "for comparison": len(trials) - len(ours),
        "rows": [_row(form, fault, rows[form, fault]) for form in FORMS for fault in FAULTS if rows[form, fault]],
    }


# What a trial's texts say, from the gravest on.
_WHY = {
    r"finished with another result|resumed to another result": "another result, and no error",
    r" hung": "a rank was still waiting long after the timeout",
    r"ended with SIG": "a rank was ended by a signal of its own",
    r"resumed rank \d+ ended": "the resumed group failed",
    r"left \w+|left:": "threads or descriptors were left",
    r"names no rank": "an error that names neither rank nor peer, nor says that none has reported one",
    r"learned of it": "an error later than the timeout and 3 s",
    r"could not be judged": "a trial that could not be judged",
    r"of nobody's": "an error that is neither overlap's nor PyTorch's",
}


def _why(text: str) -> str:
    return next((why for sign, why in _WHY.items() if re.search(sign, text)), "other")


def _row(form: str, fault: str, trials: list[dict[str, Any]]) -> dict[str, Any]:
    times = [trial["slowest_s"] for trial in trials if trial["slowest_s"] is not None]
    return {
        "form": form,
        "fault": fault,
        "trials": len(trials),
        "met": sum(trial["met"] for trial in trials),
        "clean": sum(not trial["unclean"] for trial in trials),
        "slowest_s": max(times, default=None),
        "median_s": sorted(times)[len(times) // 2] if times else None,
        "resumed exactly": sum(trial["resumed_exactly"] for trial in trials),
        "unclean seeds": [trial["seed"] for trial in trials if trial["unclean"]],
    }


def markdown(trials: list[dict[str, Any]]) -> str:
    """A line for each fault and a column for each form: clean / trials, and the slowest error in seconds."""
    table = summary(trials)
    cells = {(row["form"], row["fault"]): row for row in table["rows"]}
    forms = [form for form in FORMS if any((form, fault) in cells for fault in FAULTS)]
    lines = [
        _first_line(table),
        "",
        "| | " + " | ".join(forms) + " |",
        "| --- |" + " ---: |" * len(forms),
    ]
    for fault in FAULTS:
        found = [cells.get((form, fault)) for form in forms]
        if any(found):
            lines.append(f"| {fault} | " + " | ".join(map(_cell, found)) + " |")
    lines += ["", "What was not clean, in overlap's forms:", ""] if table["why"] else []
    lines += [f"- {why}: {count}" for why, count in table["why"].items()]
    return "\n".join(lines)


def _first_line(table: dict[str, Any]) -> str:
    return (
        f"{table['trials']} trials of overlap's forms: {table['clean']} clean, {table['resumed exactly']} resumed bit "
        f"for bit; beside them {table['for comparison']} of plain DDP. In a cell: *clean / trials*, and the longest "
        "time in seconds from the fault to another rank's error."
    )


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    slowest = "" if row["slowest_s"] is None else f", {row['slowest_s']:.1f}"
    return f"{row['clean']}/{row['trials']}{slowest}"


def write_into(path: Path, text: str, *, what: str = "soak") -> None:
    """Replaces what is between the two comments of `path` that are named so."""
    first, last = f"<!-- {what}: begin -->", f"<!-- {what}: end -->"
    before, begin, rest = path.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {first} and {last}")
    path.write_text(f"{before}{first}\n{text}\n{last}{after}")
