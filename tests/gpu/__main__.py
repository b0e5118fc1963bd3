"""Runs the checks and prints the outcomes: `PYTHONPATH=.. python -m gpu --device cuda`, in the folder `tests`."""

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from .checks import CHECKS
from .runner import Result, run_subject, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="subjects whose name contains it")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no subject after it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save what came of each check")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: give --device cpu")
    until_s = time.monotonic() + (options.time_limit or float("inf"))
    results: list[Result] = []
    saving = threading.Lock()

    def run(subject: str) -> None:
        if time.monotonic() >= until_s:
            return
        found = run_subject(subject, options.device)
        print(f"{subject}: {', '.join(f'{one.topic} {one.outcome}' for one in found)}", file=sys.stderr, flush=True)
        with saving:
            results.extend(found)
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))

    # A world of two ranks takes most of its time to start, and needs little of a GPU.
    workers = max(1, min(8, (os.cpu_count() or 1) // 2)) if options.device == "cuda" else 1
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(run, subject) for subject in CHECKS if options.only in subject]:
            done.result()
    print(summary(results))
    return int(any(result.outcome not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
