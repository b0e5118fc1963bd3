"""One process of a part: runs its cases one after the other, and says so before and after each.

    python -m benchmarks.gpu.worker SPEC.json RANK LINES.jsonl

Whoever started it reads the lines; a process that dies or hangs has said in which case.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.given import Given, Skipped, Spec
from benchmarks.ranks import die_with_parent

__all__ = ["main"]

_WHY_CHARS = 600


def main(spec_path: str, rank: int, lines_path: str) -> int:
    """Runs what the spec says; returns the exit code."""
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # The stacks of a process that hangs.
    spec = Spec(**json.loads(Path(spec_path).read_text()))
    with Path(lines_path).open("w") as lines:
        given = Given(spec=spec, rank=rank, lines=lines)
        part: Any = importlib.import_module(spec.module)
        names = part.cases(given)
        given.say("plan", cases=names)
        for name in names:
            if name not in spec.skip and not _run(part, given, name):
                return 1
        given.case = ""
        given.say("end")
    return 0


def _run(part: Any, given: Given, name: str) -> bool:
    """Runs one case; False where the process should not be used again."""
    given.case = name
    given.failures.clear()
    given.say("start", limit_s=part.limit_s(name, given) if hasattr(part, "limit_s") else None)
    try:
        part.run(name, given)
    except Skipped as reason:
        given.say("done", status="not run", why=str(reason))
        return True
    except Exception as error:
        # Streams and process groups may be in any state now: the rest is run by another process.
        traceback.print_exc()
        given.say("done", status="failed", why=_in_words(error))
        return False
    status = "failed" if given.failures else "ok"
    given.say("done", status=status, why="; ".join(given.failures)[:_WHY_CHARS])
    return True


def _in_words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:_WHY_CHARS]


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's own end: after a failure a process group may wait there for ranks that have gone.
    os._exit(code)
