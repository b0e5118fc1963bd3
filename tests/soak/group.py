"""A group of ranks: forked, watched, and ended."""

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .rank import Plan, Spec, run

_GRACE_S = 15.0  # After the group's timeout, until a rank that has not ended counts as hung.
_LOOKING_S = 0.004
_STALL_S = 0.05  # So late the machine may let this process go on; what is more is a stall.


@dataclass
class Outcome:
    """How a group ended."""

    statuses: list[int]
    hung: list[int]
    reports: list[dict[str, Any]]
    logs: list[str]
    sent_s: float | None = None
    continued_s: float | None = None
    stalled_s: float = 0.0
    """How much later this process could look than it wanted, all in all: other work had the machine, and the ranks will
    have waited as long."""
    strays: list[int] = field(default_factory=list)


def play(plan: Plan, sent: signal.Signals | None = None) -> Outcome:
    """Runs the group to its end. `sent` is a signal for the victim's process, sent shortly after its step has begun."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    listener = socket.create_server(("127.0.0.1", 0))
    read, write = os.pipe()
    pids = []
    for rank in range(plan.ranks):
        told = {**vars(plan), "fault": plan.fault if rank == plan.victim else None}
        hosts = listener if rank == 0 else None
        spec = Spec(**told, rank=rank, port=listener.getsockname()[1], listener=hosts, pipe=write)
        for left in (spec.report, spec.log, spec.end):
            left.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os.close(read)
            if rank != 0:
                listener.close()
            _live(spec)
        pids.append(pid)
    listener.close()
    os.close(write)
    outcome = Outcome(statuses=[0] * plan.ranks, hung=[], reports=[], logs=[])
    try:
        _wait(plan, pids, read, sent, outcome)
    finally:
        os.close(read)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for rank in range(plan.ranks):
        report, log = plan.folder / f"report-{rank}.json", plan.folder / f"rank-{rank}.log"
        outcome.reports.append(json.loads(report.read_text()) if report.exists() else {})
        outcome.logs.append(log.read_text(errors="replace") if log.exists() else "")
    outcome.strays = children()
    for pid in outcome.strays:  # The next trial begins without them.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return outcome


def children() -> list[int]:
    """Processes of ours that are still there; grandchildren come to us, since we are their subreaper."""
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def become_subreaper() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)


def _wait(plan: Plan, pids: list[int], read: int, sent: signal.Signals | None, outcome: Outcome) -> None:
    running = dict(enumerate(pids))
    limit_s = time.monotonic() + 2 * plan.timeout_s + plan.stopped_s + _GRACE_S
    send_s, continue_s = None, None
    looked_s = time.monotonic()
    while running and time.monotonic() < limit_s + outcome.stalled_s:
        late_s = time.monotonic() - looked_s - _LOOKING_S
        outcome.stalled_s += late_s if late_s > _STALL_S else 0.0
        looked_s = time.monotonic()
        if sent is not None and outcome.sent_s is None and send_s is None and select.select([read], [], [], 0)[0]:
            send_s = time.monotonic() + plan.delay_s
        if send_s is not None and time.monotonic() >= send_s and sent is not None:
            send_s = None
            outcome.sent_s = time.monotonic()
            if plan.victim in running:
                os.kill(running[plan.victim], sent)
                looked_s = time.monotonic()  # It may have taken a while.
            if plan.stopped_s:
                continue_s = time.monotonic() + plan.stopped_s
        if continue_s is not None and time.monotonic() >= continue_s:
            continue_s = None
            outcome.continued_s = time.monotonic()
            if plan.victim in running:
                os.kill(running[plan.victim], signal.SIGCONT)
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                outcome.statuses[rank] = os.waitstatus_to_exitcode(status)
                del running[rank]
        time.sleep(0.001 if send_s is not None else _LOOKING_S)
    for rank, pid in running.items():
        outcome.hung.append(rank)
        os.kill(pid, signal.SIGUSR1)  # Its stacks, into its log.
    if running:
        time.sleep(1)
    for rank, pid in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        outcome.statuses[rank] = -signal.SIGKILL


def _live(spec: Spec) -> NoReturn:
    """The rank, in its own process, whose interpreter ends as at the end of a script."""
    status = 1
    try:
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
        random.seed(spec.rank)
        status = run(spec)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    if spec.is_quick:
        os._exit(status)
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError
