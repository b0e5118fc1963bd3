"""`python -m mutants`: which mutants do the tests find? Status 1 if more than three live."""

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from .list import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
MOST_ALIVE = 3
_LIMIT_S = 120
_COPIED = ("overlap", "tests", "pyproject.toml")


class Result(NamedTuple):
    """How one mutant ended."""

    name: str
    outcome: str
    """``found``, ``timed out``, which counts as found, ``lived``, or ``no tests`` where nothing was run."""
    by: str
    """The first test that failed; else the selection."""
    took_s: float

    @property
    def is_found(self) -> bool:
        return self.outcome in ("found", "timed out")


def copied_to(folder: Path) -> Path:
    """A copy of the package and its tests in ``folder``; everything else are links."""
    for entry in ROOT.iterdir():
        if entry.name not in _COPIED:
            if not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry.readlink() if entry.is_symlink() else entry)
        elif entry.is_dir():
            shutil.copytree(entry, folder / entry.name)  # With the bytecode, which fits as long as a file is as old.
        else:
            shutil.copy(entry, folder)
    return folder


def tried(name: str, mutant: Mutant, copy: Path) -> Result:
    """Apply ``mutant`` to ``copy``, run its tests, and take it back."""
    path = copy / "overlap" / mutant.file
    text = path.read_text()
    start_s = time.monotonic()
    try:
        _write(path, text.replace(mutant.before, mutant.after))
        outcome, by = _run(mutant, copy)
    finally:
        _write(path, text)
    return Result(name, outcome, by, time.monotonic() - start_s)


def _write(path: Path, text: str) -> None:
    """Its bytecode may be as old, to the second, as another text of the same length."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _run(mutant: Mutant, copy: Path) -> tuple[str, str]:
    first, *others = shlex.split(mutant.tests)
    options = ["-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, f"tests/{first}", *others]
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # Ranks end with the process that started them.
            return "timed out", mutant.tests
    if process.returncode == 0:
        return "lived", mutant.tests
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", output, re.MULTILINE)
    return ("found", failed[1]) if failed else ("no tests", f"{mutant.tests}: {output.strip()[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(MUTANTS), metavar="NAME", help="may be given again")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--markdown", type=Path, help="write the table into this file")
    options = parser.parse_args()
    names = options.only or list(MUTANTS)
    copies: SimpleQueue[Path] = SimpleQueue()

    def one(name: str) -> Result:
        copy = copies.get()
        try:
            result = tried(name, MUTANTS[name], copy)
        finally:
            copies.put(copy)
        print(f"{result.outcome:9}  {result.took_s:5.1f} s  {name}: {result.by}", flush=True)
        return result

    with tempfile.TemporaryDirectory(prefix="overlap-mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            copies.put(copied_to(Path(tempfile.mkdtemp(dir=folder, prefix=f"{job}-"))))
        results = list(pool.map(one, names))
    alive = [result for result in results if not result.is_found]
    rows = [f"| {each.name} | `{MUTANTS[each.name].file}` | {each.outcome} | `{each.by}` |" for each in results]
    table = "\n".join(["| Mutant | File | Outcome | Test |", "|---|---|---|---|", *rows])
    if options.markdown is not None:
        options.markdown.write_text(table + "\n")
    print(f"\n{table}\n\n{len(results) - len(alive)} of {len(results)} found")
    return int(len(alive) > MOST_ALIVE)


if __name__ == "__main__":
    sys.exit(main())
