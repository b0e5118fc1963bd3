"""A part of `make gpu` whose cases end in every way."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu.given import Given, Skipped


def cases(given: Given) -> list[str]:
    return ["fine", "raises", "aborts", "is killed", "hangs", "is wrong", "cannot run", "one rank raises", "fine again"]


def limit_s(case: str, given: Given) -> float | None:
    return 1.5 if case == "hangs" else None


def run(case: str, given: Given) -> None:
    given.row("Cases", {"case": case, "before": True})
    if case == "raises":
        raise ValueError("on purpose,\nin two lines")
    if case == "aborts":
        os.abort()
    if case == "is killed" and given.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "hangs" or (given.rank == 1 and case in ("is killed", "one rank raises")):
        time.sleep(60)
    if case == "is wrong":
        given.wrong("it is 1 and should be 2")
    if case == "cannot run":
        raise Skipped("there is no GPU")
    if case == "one rank raises":
        raise ValueError("on purpose")
    given.row("Cases", {"case": case, "after": True})
