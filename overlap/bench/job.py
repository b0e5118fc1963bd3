"""Runs a function in a forked child, and reports how it ended when it aborts, raises or hangs.

A fork of a process that has imported everything starts in a fraction of a second, where a fresh one takes seconds;
and what a variant does to its process, down to `abort()`, ends with that process.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_STATUS_WIDTH = 160
_WRAPPING = "Got the following error when running the callback: "
# What the other ranks report when one rank has ended; never the reason why a variant failed.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset", "Broken pipe", "did not reach")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank's child ended: with a value, or a failure in words and the Unix time when it was seen."""

    value: Any = None
    failure: str | None = None
    at: float = 0.0
    # Abort and kill come from the cause itself; an exception may follow from another rank's end.
    died: bool = False


def run_job(job: Callable[[IO[str]], Any], folder: Path, label: str, *, limit_s: float) -> Outcome:
    """Calls `job(terminal)` in a child and returns what it returns, which must be JSON.

    The child's own output goes to `<label>.log` in `folder`; what it writes to `terminal` reaches the user.
    """
    result, log = folder / f"{label}.result", folder / f"{label}.log"
    child = multiprocessing.get_context("fork").Process(target=_run, args=(job, result, log))
    child.start()
    child.join(limit_s)
    if child.exitcode is None:
        child.kill()
        child.join()
        # It may have an answer and hang while it leaves.
        if not result.exists():
            return Outcome(failure=f"hangs: stopped after {limit_s:.0f} s", at=time.time())
    elif child.exitcode < 0:
        name = signal.Signals(-child.exitcode).name
        return Outcome(failure=_short(f"crashes: {name}: {_last_words(log)}"), at=time.time(), died=True)
    if not result.exists():
        return Outcome(failure=f"crashes: exit code {child.exitcode}", at=time.time(), died=True)
    return Outcome(**json.loads(result.read_text()))


def first_failure(outcomes: Sequence[Outcome]) -> int | None:
    """The rank that a job failed on first, as far as can be told, or None where it failed on none."""
    failed = [rank for rank, one in enumerate(outcomes) if one.failure is not None]
    if not failed:
        return None

    def consequences_last(rank: int) -> tuple[bool, bool, float]:
        one = outcomes[rank]
        return not one.died, _is_consequence(one.failure or ""), one.at

    return min(failed, key=consequences_last)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, in whatever way."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _run(job: Callable[[IO[str]], Any], result: Path, log: Path) -> None:
    die_with_parent()
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        outcome = Outcome(value=job(terminal))
    except Exception as error:
        outcome = Outcome(failure=_short(_in_words(error)), at=time.time())
    result.write_text(json.dumps(outcome.__dict__))


def _in_words(error: Exception) -> str:
    # What a future's callback raises comes wrapped once for every future on its way here.
    message = str(error).rpartition(_WRAPPING)[2]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines[0] if lines else ""
    hung = "timed out" in text.lower()
    kind = "" if _WRAPPING in str(error) else f"{type(error).__name__}: "
    return f"{'hangs' if hung else 'refuses'}: {kind}{text}"


def _last_words(log: Path) -> str:
    """The line that says why a process aborted."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("what():")]
    words = (reasons or lines or ["no message"])[-1].removeprefix("what():").strip()
    # Where in Gloo's sources it was noticed says nothing to a reader of a table.
    return re.sub(r"^\[enforce fail at \S+\]\s*", "", words)


def _is_consequence(text: str) -> bool:
    return any(echo in text for echo in _CONSEQUENCES)


def _short(text: str) -> str:
    return text if len(text) <= _STATUS_WIDTH else f"{text[: _STATUS_WIDTH - 1]}…"
