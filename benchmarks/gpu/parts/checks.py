"""The checks of `tests/gpu`, which need neither pytest nor anything else that may be missing."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

from benchmarks.gpu.given import Given, Skipped
from benchmarks.gpu.world import checks_of_gpu

# Topic -> its share of the part's time; what one leaves over the next ones share.
_SHARES = {"parity": 60.0, "races": 60.0, "sanitizer": 35.0, "memory": 10.0, "times": 10.0, "host waits": 20.0}
# Of which every check's figures are of interest.
_SHOWN = ("parity", "memory", "times")
_LEFT_OUT = ("first_loss", "last_loss")
_OUTCOMES = ("passed", "failed", "hung", "died", "skipped")
_ERROR = re.compile(r"(rank \d+: )?[\w.]*(Error|Exception)\b")
# The checks end by themselves before the part is stopped.
_RESERVE_S = 5.0


def cases(given: Given) -> list[str]:
    return list(_SHARES)


def limit_s(case: str, given: Given) -> float:
    return max(given.left_s, 1.0)


def run(case: str, given: Given) -> None:
    table, runner = checks_of_gpu("table"), checks_of_gpu("runner")
    chosen = [check for check in table.checks() if check.topic == case][: given.sizes.checks]
    if not any(given.device in check.devices for check in chosen):
        raise Skipped(f"the checks need {' or '.join(sorted({name for check in chosen for name in check.devices}))}")
    outcomes: Counter[str] = Counter()
    bad: list[str] = []

    def hear(result: Any) -> None:
        outcomes[result.outcome] += 1
        given.row("Checks", {"topic": case, "checks": len(chosen), **{name: outcomes[name] for name in _OUTCOMES}})
        given.data(result.name, {"outcome": result.outcome, "s": round(result.elapsed_s, 2), **result.figures})
        name = result.name.removeprefix(f"{case}: ")
        if case in _SHOWN and result.outcome != "skipped":
            given.row(case.capitalize(), {"check": name, "": result.outcome, **_figures(case, result.figures)})
        if result.outcome not in ("passed", "skipped"):
            print(f"{result.name} {result.outcome}: {result.detail}")  # Into the log.
            why = _last_error(result.detail)
            given.row("Not passed", {"check": result.name, "": result.outcome, "why": why.strip()[:200]})
            bad.append(name)

    later = list(_SHARES)[list(_SHARES).index(case) :]
    share_s = (given.left_s - _RESERVE_S) * _SHARES[case] / sum(_SHARES[topic] for topic in later)
    runner.run_checks(chosen, given.device, until_s=time.monotonic() + share_s, on_result=hear)
    if bad:
        given.wrong(f"{len(bad)} of {len(chosen)} checks did not pass: {', '.join(bad)}")


def _last_error(detail: str) -> str:
    """The line of a traceback that names the exception; CUDA's have lines of advice behind it."""
    return next((line for line in reversed(detail.splitlines()) if _ERROR.match(line)), detail)


def _figures(topic: str, found: dict[str, Any]) -> dict[str, Any]:
    """Those that have room in a table; those of memory are bytes, and shown in MB."""
    kept = {name: value for name, value in found.items() if name not in _LEFT_OUT and not isinstance(value, list)}
    if topic == "memory":
        kept = {name.removesuffix("_bytes"): round(value / 1e6, 2) for name, value in kept.items()}
    return {name.replace("_", " "): value for name, value in kept.items()}
