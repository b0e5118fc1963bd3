"""A part of `make gpu` that takes all the time it is given."""

from __future__ import annotations

import time

from benchmarks.gpu.given import Given


def cases(given: Given) -> list[str]:
    return ["quick", "long", "after it"]


def run(case: str, given: Given) -> None:
    given.row("", {"case": case})
    if case == "long":
        time.sleep(60)
