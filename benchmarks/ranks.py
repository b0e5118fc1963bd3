"""The network between ranks, and a process for each rank, which runs a function.

A rank that raises, crashes or hangs ends the processes of its run and nothing else: the caller gets a `RankError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.link import ShapedLink, enter_namespace
from overlap._link import parse_bandwidth
from overlap._torch.device import synchronize
from overlap.errors import ConfigurationError

LinkKind = Literal["namespaces", "loopback", "direct"]
# Imported once, by the process that all ranks are forked from: seconds each.
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.algorithms.model_averaging.averagers",
    "torch.distributed.optim",
    "sklearn.datasets",
    "sklearn.model_selection",
    "overlap",
)
# After the first failure, how long the other ranks have to report theirs.
_GRACE_S = 2.0
_REASON_CHARS = 160
_OUTPUT_CHARS = 4000
_PR_SET_PDEATHSIG = 1
_WRAPPING = "Got the following error when running the callback: "
# The messages of a rank that only saw another one go.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset", "Broken pipe", "BrokenBarrierError")


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the ranks reach each other."""

    ranks: int
    kind: LinkKind
    device: str
    bandwidth_bytes_per_s: float | None
    # By rank: the network namespaces of shaped links, and the variables that lead a backend to its interface.
    namespaces: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]

    @property
    def timeout_s(self) -> float:
        """After which a collective counts as hung: generous for 100 MB on this link."""
        speed = self.bandwidth_bytes_per_s
        return 60.0 if speed is None else max(60.0, 10 * self.ranks * 100e6 / speed)


@contextlib.contextmanager
def open_network(ranks: int, *, bandwidth: str | None = None, device: str = "cpu") -> Iterator[Network]:
    """The network that this machine allows; prints a line if it is not the one that was asked for."""
    speed = None if bandwidth is None else parse_bandwidth(bandwidth)
    if device == "cuda" and (gpus := torch.cuda.device_count()) < ranks:
        raise ConfigurationError(f"ranks={ranks} is more than the {gpus} GPUs of this machine: give --device cpu")
    kind: LinkKind = "loopback" if device == "cpu" else "direct"
    environments = [{"GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {} for _ in range(ranks)]
    namespaces: list[str] = []
    with contextlib.ExitStack() as stack:
        if speed is not None:
            try:
                link = stack.enter_context(ShapedLink(ranks=ranks, bandwidth_bytes_per_s=speed))
            except ConfigurationError as error:
                _say(f"{error}; measuring without a speed limit instead")
            else:
                kind = "namespaces"
                namespaces = [link.namespace(rank) for rank in range(ranks)]
                environments = [link.env(rank) for rank in range(ranks)]
        yield Network(
            ranks=ranks,
            kind=kind,
            device=device,
            bandwidth_bytes_per_s=speed,
            namespaces=tuple(namespaces),
            environments=tuple(environments),
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class World:
    """A rank's side of a run, with the default process group open."""

    network: Network
    rank: int
    device: torch.device
    _barrier: Any
    _pipe: Connection

    def meet(self) -> None:
        """Returns when every rank is here; sends nothing over the network."""
        self._barrier.wait(self.network.timeout_s)

    def synchronize(self) -> None:
        """Waits for the device; a step on CUDA has only been launched when it returns."""
        synchronize(self.device)

    def begin(self, name: str) -> None:
        """Names the work that comes next, for the error if it fails."""
        self._pipe.send(("begin", name))


class RankError(RuntimeError):
    """A rank raised, crashed or hung: one line, that of the rank that was first."""

    def __init__(self, reason: str, *, during: str, output: str) -> None:
        super().__init__(reason)
        # The work that the rank had named by `World.begin`.
        self.during = during
        self.add_note(output)


def run_on_ranks(network: Network, job: Callable[..., Any], *args: Any, limit_s: float = 86400.0) -> list[Any]:
    """Calls `job(world, *args)` in a new process for each rank, and returns the results by rank.

    Job, arguments and results must pickle. The ranks' own output is kept apart and shown with an error.

    Raises:
        RankError: a rank raised an exception, died, or did not return within `limit_s` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    # Python 3.11's fork server does not take over the parent's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in (str(Path.cwd()), *sys.path) if path))
    barrier = context.Barrier(network.ranks)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="overlap-ranks-") as folder:
        try:
            for rank in range(network.ranks):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (network, rank, barrier, folder, theirs, job, args)
                process = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, _log(folder, rank)))
            _watch(ranks, time.monotonic() + limit_s, limit_s)
        finally:
            for one in ranks:
                one.process.kill()
            for one in ranks:
                one.process.join()
                one.pipe.close()
        failed = [one for one in ranks if one.failure is not None]
        if failed:
            # A death comes from the cause itself; an exception may follow from another rank's end.
            cause = min(failed, key=lambda one: (not one.has_died, one.is_consequence, one.ended_at))
            raise RankError(cause.failure or "", during=cause.during, output=cause.output)
        return [one.value for one in ranks]


@dataclass
class _Rank:
    """A rank as its parent sees it."""

    process: Any
    pipe: Connection
    log: Path
    during: str = ""
    value: Any = None
    failure: str | None = None
    has_died: bool = False
    is_over: bool = False
    ended_at: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace").strip()[-_OUTPUT_CHARS:] if self.log.exists() else ""

    @property
    def is_consequence(self) -> bool:
        return any(words in (self.failure or "") for words in _CONSEQUENCES)

    def listen(self) -> None:
        """Takes one message, or notes that the process has ended without a result."""
        try:
            kind, content = self.pipe.recv()
        except EOFError:
            self.has_died = True
            self.process.join(5)
            self.end(failure=self._death())
            return
        if kind == "begin":
            self.during = content
        elif kind == "failure":
            self.end(failure=content)
        else:
            self.value = content
            self.end()

    def end(self, *, failure: str | None = None) -> None:
        self.failure = None if failure is None else _shortened(failure)
        self.is_over, self.ended_at = True, time.monotonic()

    def _death(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"crashes: exit code {code}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("what():")]
        words = (reasons or lines or ["no message"])[-1].removeprefix("what():").strip()
        # The place in Gloo's sources says nothing to a reader of a table.
        words = re.sub(r"^\[enforce fail at \S+\]\s*", "", words)
        return f"crashes: {signal.Signals(-code).name}: {words}"


def _watch(ranks: list[_Rank], until: float, limit_s: float) -> None:
    """Follows the ranks until each has ended in some way."""
    while running := [one for one in ranks if not one.is_over]:
        ready = wait([one.pipe for one in running], timeout=max(0.0, until - time.monotonic()))
        if not ready:
            for one in running:
                one.end(failure=f"hangs: stopped after {limit_s:.0f} s")
        for one in running:
            if one.pipe in ready:
                one.listen()
        if any(one.failure is not None for one in ranks):
            until = min(until, time.monotonic() + _GRACE_S)


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"output{rank}.txt"


def _rank_main(
    network: Network, rank: int, barrier: Any, folder: str, pipe: Connection, job: Callable[..., Any], args: Any
) -> None:
    die_with_parent()
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        value = job(World(network, rank, _join(network, rank, folder), barrier, pipe), *args)
        # Not after an error: the others would report a closed connection in place of the reason.
        dist.destroy_process_group()
        pipe.send(("value", value))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failure", _reason(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's own end: after a failure a process group may wait there for ranks that have gone.
    os._exit(0)


def _join(network: Network, rank: int, folder: str) -> torch.device:
    """Joins the default process group; returns the rank's device."""
    if network.namespaces:
        enter_namespace(network.namespaces[rank])
    os.environ.update(network.environments[rank])
    # Ranks share the cores: with the default of one thread per core each, they would compete for them.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if network.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(folder) / "store"), network.ranks),
        rank=rank,
        world_size=network.ranks,
        timeout=timedelta(seconds=network.timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return device


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, in whatever way."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _reason(error: Exception) -> str:
    # An exception in a future's callback comes wrapped once for every future on its way here.
    message = str(error).rpartition(_WRAPPING)[2]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines[0] if lines else ""
    kind = "" if _WRAPPING in str(error) else f"{type(error).__name__}: "
    return f"{'hangs' if 'timed out' in text.lower() else 'refuses'}: {kind}{text}"


def _shortened(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else f"{text[: _REASON_CHARS - 1]}…"
