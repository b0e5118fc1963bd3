"""Runs the checks and says what came of them: `PYTHONPATH=.. python -m gpu --device cuda`, in the folder `tests`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from .check import Result
from .runner import run_checks, summary
from .table import checks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name contains it")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no check after it")
    parser.add_argument("--json", metavar="FILE", help="save what came of each")
    options = parser.parse_args()
    chosen = [check for check in checks() if options.only in check.name]
    until_s = None if options.time_limit is None else time.monotonic() + options.time_limit
    results = run_checks(chosen, options.device, until_s=until_s, on_result=_say)
    print(summary(results))
    if options.json is not None:
        Path(options.json).write_text(json.dumps([result.as_dict() for result in results], indent=1))
    return int(any(result.outcome not in ("passed", "skipped") for result in results))


def _say(result: Result) -> None:
    if result.outcome != "skipped":
        print(f"{result.outcome:8}{result.elapsed_s:7.1f} s  {result.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
