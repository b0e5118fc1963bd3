"""The processes of one part: started, watched and ended.

A case that raises, crashes or hangs ends its processes, is reported as such, and new processes go on with the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.given import Spec
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.report import CaseReport, PartReport, Status

__all__ = ["run_cases"]

_POLL_S = 0.05
# After a rank's end its peers may show a better reason.
_GRACE_S = 1.0
_STACKS_S = 1.0
_TAIL_CHARS = 300
_LOG_CHARS = 200_000
_START = "the start"
_ROOT = Path(__file__).parents[2]
# How exceptions begin that say that another rank has gone.
_CONSEQUENCES = ("DistBackendError", "DistNetworkError", "RuntimeError: [")


def run_cases(part: PartReport, spec: Spec, *, case_limit_s: float, log: Path) -> None:
    """Runs the part's cases until all are reported or its time is up; what they find is added to ``part``."""
    for attempt in range(1000):
        crew = _Crew(part, replace(spec, skip=tuple(case.name for case in part.cases)), attempt)
        try:
            crew.start()
            goes_on = crew.watch(case_limit_s)
        finally:
            crew.end()
            crew.keep_output(log)
        if not goes_on:
            return


@dataclass(kw_only=True)
class _Worker:
    process: subprocess.Popen[bytes]
    lines: Lines
    output: Path
    case: str = _START
    since: float = field(default_factory=time.time)
    """When the case began."""
    limit_s: float | None = None
    """That it set itself; the part's where ``None``."""
    done: dict[str, tuple[Status, str]] = field(default_factory=dict)
    """How cases ended, and why."""
    is_over: bool = False

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def end(self) -> tuple[Status, str]:
        """How a worker that has ended did so in its last case."""
        if self.case in self.done:
            return self.done[self.case]
        code = self.process.returncode
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return "crashed", f"{how}: {self.last_words}" if self.last_words else how

    @property
    def last_words(self) -> str:
        lines = [line.strip() for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        # Below an abort's message Python's fault handler lists the stacks.
        fatal = [line for line in lines if line.startswith(("Fatal Python error", "terminate called", "what():"))]
        return (fatal or lines or [""])[-1][-_TAIL_CHARS:]


class _Crew:
    def __init__(self, part: PartReport, spec: Spec, attempt: int) -> None:
        self._part = part
        self._attempt = attempt
        self._folder = Path(spec.scratch) / f"{part.name}-{attempt}"
        self._spec = replace(spec, scratch=str(self._folder))
        self._workers: list[_Worker] = []
        self._planned: list[str] = []

    def start(self) -> None:
        self._folder.mkdir(parents=True)
        spec = self._folder / "spec.json"
        spec.write_text(json.dumps(asdict(self._spec)))
        for rank in range(self._spec.ranks):
            lines, output = self._folder / f"lines{rank}.jsonl", self._folder / f"output{rank}.txt"
            lines.touch()
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu.worker", str(spec), str(rank), str(lines)],
                    cwd=_ROOT,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,  # What it starts itself is ended with it.
                )
            self._workers.append(_Worker(process=process, lines=Lines(lines), output=output))

    def watch(self, case_limit_s: float) -> bool:
        """Follows the workers to their end; returns whether there are cases left for new ones."""
        while True:
            # Looked at before the lines are read: by then all is there that a process has written.
            ended = [worker.has_ended for worker in self._workers]
            self._listen()
            if all(worker.is_over for worker in self._workers):
                return False
            if time.time() > self._spec.until:
                return self._out_of_time()
            for worker, has_ended in zip(self._workers, ended, strict=True):
                if has_ended and not worker.is_over:
                    return self._one_ended()
                if not worker.is_over and time.time() - worker.since > (worker.limit_s or case_limit_s):
                    return self._one_hangs(worker)
            time.sleep(_POLL_S)

    def end(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        # What was said before the end is in the report, whatever ended the watch.
        self._listen()
        for worker in self._workers:
            worker.lines.close()

    def keep_output(self, log: Path) -> None:
        with log.open("a") as stream:
            for rank, worker in enumerate(self._workers):
                if text := worker.output.read_text(errors="replace").strip()[-_LOG_CHARS:]:
                    stream.write(f"=== {self._part.name}, process {self._attempt}, rank {rank}\n{text}\n")

    def _listen(self) -> None:
        for rank, worker in enumerate(self._workers):
            for line in worker.lines:
                self._hear(rank, worker, json.loads(line))

    def _hear(self, rank: int, worker: _Worker, said: Mapping[str, Any]) -> None:
        event, part = said["event"], self._part
        if event == "plan":
            self._planned = said["cases"]
        elif event == "start":
            worker.case, worker.since, worker.limit_s = said["case"], time.time(), said["limit_s"]
        elif event == "end":
            worker.is_over = True
        elif event == "done":
            worker.done[said["case"]] = said["status"], said["why"]
            ends = [one.done.get(said["case"]) for one in self._workers]
            if None not in ends:
                self._report(said["case"], next((end for end in ends if end and end[0] != "ok"), ("ok", "")))
        elif rank == 0:
            part.add(event, said)

    def _one_ended(self) -> bool:
        time.sleep(_GRACE_S)
        self._listen()
        ended = [worker for worker in self._workers if worker.has_ended and not worker.is_over]
        # A death comes from the cause itself; an exception may follow from another rank's end.
        first = min(ended, key=lambda worker: (worker.end[0] != "crashed", worker.end[1].startswith(_CONSEQUENCES)))
        return self._give_up(first, *first.end)

    def _one_hangs(self, worker: _Worker) -> bool:
        for one in self._workers:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)
        waited_s = time.time() - worker.since
        return self._give_up(worker, "hung", f"stopped after {waited_s:.0f} s; its stacks are in log.txt")

    def _out_of_time(self) -> bool:
        left = [name for name in self._planned if all(case.name != name for case in self._part.cases)]
        self._part.why = "its time was up" + (f" with {len(left)} of {len(self._planned)} cases to go" if left else "")
        for name in left:
            is_running = name == self._workers[0].case
            self._report(name, ("not run", "stopped: its time was up" if is_running else "no time was left"))
        return False

    def _give_up(self, worker: _Worker, status: Status, why: str) -> bool:
        """Reports the case that a worker ended in; returns whether there are cases left."""
        if worker.case not in self._planned:
            self._part.status, self._part.why = "failed", f"{status} in {worker.case}: {why}"
            return False
        self._report(worker.case, (status, why))
        return any(all(case.name != name for case in self._part.cases) for name in self._planned)

    def _report(self, case: str, end: tuple[Status, str]) -> None:
        if any(one.name == case for one in self._part.cases):
            return
        since = next((worker.since for worker in self._workers if worker.case == case), time.time())
        wall_s = round(time.time() - since, 2)
        self._part.cases.append(CaseReport(name=case, status=end[0], why=end[1], wall_s=wall_s))


def _environment() -> dict[str, str]:
    # Ranks share the cores, and what is timed is one thread's launching.
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
