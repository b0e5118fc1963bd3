"""What one rank does: build or resume, train, save, meet its fault, and write down how it ended."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap
from harness.models import MLP, mean_squared_error

from . import checkpoints
from .forms import FORMS, Built, Form, Planned

STEPS = 14
SAVED_EVERY = 2
SHORTER_BY = 4  # Under Join the last rank has so many steps less.
_MIB = 2**20
_LEFT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a group is told."""

    form: str
    ranks: int
    folder: Path
    timeout_s: float = 8.0
    fault: str | None = None
    victim: int = -1
    fault_step: int = -1
    delay_s: float = 0.0
    stopped_s: float = 0.0
    resumes_from: int | None = None
    stops_after: int = STEPS
    destroys: bool = True  # The process group, after an error; otherwise the error just ends the script.
    is_quick: bool = False  # Ranks leave without the end of the interpreter, which takes two seconds.


@dataclass(frozen=True, kw_only=True)
class Spec(Plan):
    """What one rank is told; the fault is the victim's only."""

    rank: int
    port: int
    listener: socket.socket | None  # Of the rank that hosts the store.
    pipe: int  # Where the victim says that its step has begun.

    @property
    def report(self) -> Path:
        return self.folder / f"report-{self.rank}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"rank-{self.rank}.log"

    @property
    def end(self) -> Path:
        return self.folder / f"end-{self.rank}.pt"


@dataclass
class _Report:
    """What the parent reads; it is on disk before the rank ends."""

    spec: Spec
    said: dict[str, Any] = field(default_factory=dict)

    def say(self, **what: Any) -> None:
        self.said.update(what)
        beside = self.spec.report.with_suffix(".part")
        beside.write_text(json.dumps(self.said))
        beside.replace(self.spec.report)


def run(spec: Spec) -> int:
    """The whole life of the rank. Its errors leave the script as a user's would, unless `spec.destroys`."""
    _redirect(spec)
    report = _Report(spec)
    # libuv, which serves PyTorch's store, opens two descriptors of the process once, and keeps them.
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = _held()
    training: _Training | None = _Training(spec, report)
    try:
        training.run()
    except BaseException as error:
        report.say(error=_described(error), error_s=time.monotonic())
        if not spec.destroys:
            raise
    else:
        report.say(done_s=time.monotonic())
    training = None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    report.say(left=_left(before, within_s=_LEFT_S), end_s=time.monotonic())
    return 0 if "error" not in report.said else 1


class _Training:
    def __init__(self, spec: Spec, report: _Report) -> None:
        self.spec, self.report = spec, report
        self.form: Form = FORMS[spec.form]
        self.batches = STEPS - (SHORTER_BY if self.form.is_joined and spec.rank == spec.ranks - 1 else 0)
        self.last = min(self.batches, spec.stops_after)
        if spec.fault == "a step more":
            self.last += 1
        self.last_saved = STEPS - SHORTER_BY - 1 if self.form.is_joined else STEPS
        self.built: Built | None = None
        self.step = 0

    def run(self) -> None:
        spec = self.spec
        self._init_group()
        if spec.fault == "another plan":
            self.report.say(fault_s=time.monotonic())
        self.built = self.form.made(is_other=spec.fault == "another plan")
        if spec.resumes_from is not None:
            state = checkpoints.load(checkpoints.file_of(spec.folder, spec.resumes_from, spec.rank))
            overlap.load_state_dict(self.built.ddp, self.built.optimizer, state)
            self.step = spec.resumes_from
        if spec.fault == "exception in a stage":
            self.built.trap.set_for = spec.fault_step
        self.report.say(started_s=time.monotonic())
        if not self.form.is_joined:
            for batch in self._loader():
                self._train(batch)
        else:
            self._train_joined()
        checkpoints.save(overlap.state_dict(self.built.ddp, self.built.optimizer), spec.end)

    def _init_group(self) -> None:
        spec = self.spec
        timeout = datetime.timedelta(seconds=spec.timeout_s)
        listener = None if spec.listener is None else spec.listener.detach()
        store = dist.TCPStore(
            "127.0.0.1",
            spec.port,
            None,
            listener is not None,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.ranks, timeout=timeout)
        if store.add("ranks that are ready", 1) == spec.ranks:
            store.set("all are ready", "")
        store.wait(["all are ready"])

    def _loader(self) -> Iterator[Any]:
        """The batches from this step on."""
        for step in range(self.step, self.last):
            if self._meets("exception in the loader", step):
                raise Planned(f"the loader raises in step {step}")
            yield MLP.batch(step, self.spec.rank)

    def _train_joined(self) -> None:
        built = self.built
        assert built is not None
        with overlap.Join([built.ddp, built.optimizer]) as join:
            for batch in join.iterate(self._loader()):
                self._train(batch)

    def _train(self, batch: Any) -> None:
        built, spec, step = self.built, self.spec, self.step
        assert built is not None
        built.trap.step = step
        if step == spec.fault_step and spec.fault is not None:
            self.report.say(fault_s=time.monotonic())
            os.write(spec.pipe, b".")
        built.optimizer.zero_grad()
        loss = mean_squared_error(built.ddp, batch)
        if self._meets("exception in the loss", step):
            raise Planned(f"the loss raises in step {step}")
        if self._meets("out of memory", step):
            _run_out_of_memory()
        loss.backward()
        built.optimizer.step()
        self.step += 1
        if self.step % SAVED_EVERY == 0 and self.step <= self.last_saved:
            self._save()
        if spec.fault in _SENT and step >= spec.fault_step:
            time.sleep(0.02)  # So that what the parent sends comes before the end.

    def _save(self) -> None:
        built, spec = self.built, self.spec
        assert built is not None
        state = overlap.state_dict(built.ddp, built.optimizer)
        fault = _IN_SAVES.get(spec.fault or "") if self.step >= spec.fault_step else None
        if fault is not None:
            self.report.say(fault_s=time.monotonic())
        with contextlib.nullcontext() if fault is None else fault():
            checkpoints.save(state, checkpoints.file_of(spec.folder, self.step, spec.rank))

    def _meets(self, fault: str, step: int) -> bool:
        if self.spec.fault != fault or step != self.spec.fault_step:
            return False
        self.report.say(fault_s=time.monotonic())
        return True


_SENT = ("SIGKILL", "SIGTERM", "SIGTERM, handled", "SIGSTOP")


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


_IN_SAVES = {"killed in a save": checkpoints.killed_while_writing, "full disk": _full_disk}


def _run_out_of_memory() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 64 * _MIB, resource.RLIM_INFINITY))
    try:
        torch.ones(256 * _MIB // 4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _redirect(spec: Spec) -> None:
    descriptor = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if spec.fault == "SIGTERM, handled":
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _described(error: BaseException) -> dict[str, Any]:
    kinds = [kind.__module__ for kind in type(error).__mro__]
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "is_ours": any(module.startswith("overlap.errors") for module in kinds),
        "message": str(error),
        "notes": list(getattr(error, "__notes__", [])),
    }


def _held() -> dict[str, set[str]]:
    threads = {thread.name for thread in threading.enumerate()}
    native = {f"{task.name} {_comm(task)}" for task in Path("/proc/self/task").iterdir()}
    descriptors = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptors.add(f"{link.name} {link.readlink()}")
    return {"threads": threads, "native threads": native, "descriptors": descriptors}


def _comm(task: Path) -> str:
    with contextlib.suppress(OSError):
        return (task / "comm").read_text().strip()
    return "?"


def _left(before: dict[str, set[str]], *, within_s: float) -> dict[str, list[str]]:
    """What is still held so long after the group has been destroyed."""
    deadline_s = time.monotonic() + within_s
    while True:
        now = _held()
        left = {what: sorted(now[what] - before[what]) for what in before if now[what] - before[what]}
        if not left or time.monotonic() > deadline_s:
            if "threads" in left:
                faulthandler.dump_traceback(all_threads=True)
            return left
        gc.collect()
        time.sleep(0.05)
