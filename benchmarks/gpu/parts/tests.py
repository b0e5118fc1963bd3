"""The tests that are marked for GPUs, where pytest is there."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.given import Given, Skipped
from benchmarks.gpu.lines import Lines

_ROOT = Path(__file__).parents[3]
_TESTS = _ROOT / "tests"
_ALL = "all"
# Where a file marks tests of its own, and not in a text that it writes.
_MARK = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu\b", re.MULTILINE)
# A line of a test's result, as `pytest -v` prints it.
_RESULT = re.compile(r"^(?P<test>\S+::.*?) (?P<outcome>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_SHOWN = ("passed", "failed", "error", "skipped")
_LEAST_S = 5.0
_POLL_S = 0.1


def cases(given: Given) -> list[str]:
    # Without a GPU all are skipped, which one process can do.
    return [_ALL] if given.device == "cpu" else [str(path.relative_to(_TESTS)) for path in _files()]


def limit_s(case: str, given: Given) -> float:
    return max(given.left_s, 1.0)


def run(case: str, given: Given) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    files = _files() if case == _ALL else [_TESTS / case]
    if not files:
        raise Skipped("no test is marked for GPUs")
    if given.left_s < _LEAST_S:
        raise Skipped("no time was left")
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *_without_plugins()]
    outcomes: Counter[str] = Counter()
    failed = []
    # Not a pipe: pytest's fork server may keep that open.
    log = given.scratch / "pytest.txt"
    with log.open("w") as written, contextlib.closing(Lines(log)) as read:
        process = subprocess.Popen([*command, *map(str, files)], cwd=_ROOT, stdout=written, stderr=written)
        for line in _lines(process, read):
            print(line)
            if (found := _RESULT.match(line)) is None:
                continue
            outcomes[found["outcome"].lower()] += 1
            if found["outcome"] in ("FAILED", "ERROR"):
                failed.append(found["test"].rpartition("::")[2])
            # After each test: what ends this process leaves the others' results.
            given.row("", {"tests": case, **{name: outcomes[name] for name in _SHOWN}})
    code = process.returncode
    if failed:
        given.wrong(f"failed: {', '.join(failed)}")
    elif code not in (0, 5):
        given.wrong(f"pytest left with exit code {code}; its output is in log.txt")
    if not outcomes["passed"]:
        raise Skipped("all tests were skipped" if outcomes["skipped"] else "no test was found")


def _lines(process: subprocess.Popen[bytes], read: Lines) -> Iterator[str]:
    """What a process writes, line by line, until it ends."""
    while True:
        has_ended = process.poll() is not None
        yield from read
        if has_ended:
            return
        time.sleep(_POLL_S)


def _files() -> list[Path]:
    return sorted(path for path in _TESTS.rglob("test_*.py") if _MARK.search(path.read_text()))


def _without_plugins() -> list[str]:
    """Options that let pytest start where plugins are missing that the project's settings speak of."""
    if importlib.util.find_spec("pytest_timeout") is not None:
        return []
    return ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]
