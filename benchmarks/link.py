"""A network of known speed on one machine: a namespace per rank, veth pairs to a bridge, a token bucket per link.

Nothing is added to the machine's own network except names under `/run/netns`: the bridge has its own namespace, so
deleting the namespaces deletes everything. The names carry the process id and its start time, so the next run
recognizes and removes those that a killed run has left behind.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from overlap._link import CLONE_NEWNET, INTERFACE, MTU, SETTINGS, SUBNET, missing_requirement, run_tool, token_bucket
from overlap.errors import ConfigurationError

_PREFIX = "overlap"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(hub|r\d+)$")
_NETNS_DIR = Path("/run/netns")


def shared_gpu_env(rank: int, *, interface: str = "lo") -> dict[str, str]:
    """Variables that keep NCCL's ranks to sockets over `interface`, so that several can share one GPU.

    They must be set in a rank before it makes its first NCCL communicator.
    """
    return {
        # NCCL refuses two ranks on one GPU by comparing host and bus: each seems to be on a host of its own.
        "NCCL_HOSTID": f"overlap-rank-{rank}",
        # Between hosts NCCL takes the best network that it finds, a cluster's plugin or InfiniBand included.
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": interface,
        # Other ways to see that it is one host: memory of the GPU, of the machine, or of an NVLink domain.
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }


def enter_namespace(name: str) -> None:
    """Moves this process, which must have one thread, into a network namespace; `/sys` shows its old one still."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NETNS_DIR / name).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise ConfigurationError(f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")


@dataclass(kw_only=True)
class ShapedLink:
    """Ranks joined by links of `bandwidth_bytes_per_s`, each way, for as long as the context is open.

    SIGTERM and SIGHUP are turned into an orderly exit while it is open, so that they clean up as Ctrl-C does.
    Entering raises `ConfigurationError` where the network cannot be made, and leaves nothing behind.
    """

    ranks: int
    bandwidth_bytes_per_s: float
    _owner: str = field(init=False, default="")
    _handlers: dict[int, object] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 250:
            raise ValueError(f"ranks={self.ranks} is out of range: the network holds 1 to 250 ranks")
        self._owner = f"{_PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}"

    def namespace(self, rank: int) -> str:
        return f"{self._owner}-r{rank}"

    def address(self, rank: int) -> str:
        return f"{SUBNET}.{rank + 1}"

    def env(self, rank: int) -> dict[str, str]:
        """Variables that lead the backends of `rank` to its interface."""
        # NCCL would see that the ranks are on one host, and not use the link.
        return {"GLOO_SOCKET_IFNAME": INTERFACE, **shared_gpu_env(rank, interface=INTERFACE)}

    def __enter__(self) -> Self:
        missing = missing_requirement()
        if missing is not None:
            raise ConfigurationError(f"cannot shape a link: {missing}")
        _remove_leftovers()
        self._catch_signals()
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            for name in _our_namespaces():
                if name.startswith(f"{self._owner}-"):
                    _remove_namespace(name)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()

    def _make(self) -> None:
        hub = f"{self._owner}-hub"
        _ip("netns", "add", hub)
        _quiet_namespace(hub)
        _ip("-n", hub, "link", "add", "bridge", "mtu", MTU, "type", "bridge", "forward_delay", "0")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for rank in range(self.ranks):
            name, port = self.namespace(rank), f"port{rank}"
            _ip("netns", "add", name)
            _quiet_namespace(name)
            _ip("-n", hub, "link", "add", port, "mtu", MTU, "type", "veth",
                "peer", "name", INTERFACE, "mtu", MTU, "netns", name)  # fmt: skip
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            self._shape(name, INTERFACE)
            self._shape(hub, port)

    def _shape(self, namespace: str, device: str) -> None:
        run_tool("tc", "-n", namespace, "qdisc", "add", "dev", device, *token_bucket(self.bandwidth_bytes_per_s))

    def _catch_signals(self) -> None:
        # Python lets only the main thread set handlers; elsewhere the owner of the main thread looks after signals.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, _exit_on_signal)


def _remove_leftovers() -> None:
    """Removes the namespaces of runs whose process is gone."""
    for name in _our_namespaces():
        match = _NAME.fullmatch(name)
        assert match is not None
        if _start_ticks(int(match[1])) != int(match[2]):
            _remove_namespace(name)


def _our_namespaces() -> list[str]:
    if not _NETNS_DIR.is_dir():
        return []
    return sorted(entry.name for entry in _NETNS_DIR.iterdir() if _NAME.fullmatch(entry.name))


def _remove_namespace(name: str) -> None:
    # A namespace lives on without a name while a process is in it: its processes are killed first.
    deadline = time.monotonic() + 5
    while (pids := _pids_in(name)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ConfigurationError):
        _ip("netns", "del", name)


def _pids_in(name: str) -> list[int]:
    with suppress(ConfigurationError):
        return [int(word) for word in _ip("netns", "pids", name).split()]
    return []


def _quiet_namespace(name: str) -> None:
    for key, value in SETTINGS.items():
        _ip("netns", "exec", name, "sh", "-c", f"echo {value} >/proc/sys/net/{key} 2>/dev/null || true")


def _start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot; 0 when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def _ip(*words: str) -> str:
    return run_tool("ip", *words)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back signals that ask for an end: a second Ctrl-C must not stop the clean-up."""
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
