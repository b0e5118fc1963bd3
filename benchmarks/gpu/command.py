"""The command: runs the parts one after the other, and writes the report after each."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.crew import run_cases
from benchmarks.gpu.given import Spec
from benchmarks.gpu.markdown import markdown
from benchmarks.gpu.page import write_page
from benchmarks.gpu.plan import PARTS, Part
from benchmarks.gpu.report import PartReport, Report
from benchmarks.gpu.sizes import SIZES

__all__ = ["main", "run"]

_BUDGET_S = {"cuda": 450.0, "cpu": 240.0}
_SIZE = {"cuda": "full", "cpu": "small"}
# A part takes some seconds to start, whatever its share; one that has less than the second is not begun.
_USEFUL_S, _LEAST_S = 30.0, 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the options say; returns 1 if anything that was run failed, crashed or hung."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.page is not None:
            write_page(options.folder / "report.json", options.page)
            return 0
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "log.txt").touch()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    unknown = sorted({*options.parts} - {part.name for part in PARTS})
    if unknown:
        parser.error(f"--parts has {', '.join(unknown)}: known are {', '.join(part.name for part in PARTS)}")
    if options.budget is not None and options.budget <= 0:
        parser.error(f"--budget is {options.budget:g}: give the seconds that all of it may take")
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    signal.signal(signal.SIGTERM, _end)
    report = run(
        parts,
        options.folder,
        device=options.device,
        size=options.size or _SIZE[options.device],
        budget_s=_BUDGET_S[options.device] if options.budget is None else options.budget,
    )
    print(f"\n{markdown(report)}\n{options.folder / 'report.md'}", flush=True)
    return int(any(part.is_wrong for part in report.parts))


def run(parts: Sequence[Part], folder: Path, *, device: str, size: str, budget_s: float) -> Report:
    """Runs the parts within ``budget_s`` seconds and leaves report.json, report.md, log.txt and pictures in ``folder``.

    Each part has its share of what is left of the time, so what one does not need is the others'.
    """
    start = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    log.write_text("")
    report = Report(started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start)), device=device, size=size,
                    budget_s=budget_s)  # fmt: skip
    report.parts = [PartReport(name=part.name, title=part.title, about=part.about) for part in parts]
    with tempfile.TemporaryDirectory(prefix="overlap-gpu-", ignore_cleanup_errors=True) as scratch:
        try:
            failed = ""
            for place, (part, found) in enumerate(zip(parts, report.parts, strict=True)):
                if failed:
                    found.why = f"'{failed}' failed"
                    continue
                left_s = start + budget_s - time.time()
                share_s = left_s * part.share / sum(one.share for one in parts[place:])
                found.limit_s = round(min(max(share_s, _USEFUL_S), left_s), 1)
                if found.limit_s < _LEAST_S:
                    found.why = "no time was left"
                    continue
                print(f"{part.title}: up to {found.limit_s:.0f} s", file=sys.stderr, flush=True)
                _run_part(part, found, folder, scratch, report, log)
                failed = part.title if part.is_vital and found.is_wrong else ""
                report.wall_s = round(time.time() - start, 1)
                save(report, folder)
        finally:
            report.wall_s = round(time.time() - start, 1)
            report.is_over = True
            save(report, folder)
    return report


def save(report: Report, folder: Path) -> None:
    """Writes the report, as JSON and as Markdown."""
    report.save(folder / "report.json")
    (folder / "report.md").write_text(markdown(report))


def _run_part(part: Part, found: PartReport, folder: Path, scratch: str, report: Report, log: Path) -> None:
    began = time.time()
    spec = Spec(
        module=part.module_name,
        device=report.device,
        size=report.size,
        ranks=part.ranks,
        skip=(),
        until=began + found.limit_s,
        scratch=scratch,
        shared=scratch,
        folder=str(folder.resolve()),
    )
    try:
        run_cases(found, spec, case_limit_s=part.case_limit_s, log=log)
    finally:
        found.wall_s = round(time.time() - began, 1)
        found.settle()
    print(f"  {found.status} after {found.wall_s:.0f} s {found.why}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=tuple(_BUDGET_S), default="cuda", help="cpu: a dry run in its place")
    parser.add_argument("--folder", type=Path, default=Path("overlap-gpu"), help="where the report is left")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it")
    parser.add_argument("--size", choices=tuple(SIZES), help="how much is run; by default what fits the device")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[], metavar="A,B,...", help="only these")
    parser.add_argument("--page", type=Path, metavar="FILE.md",
                        help="run nothing: write the folder's report into this page's section")  # fmt: skip
    return parser


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
