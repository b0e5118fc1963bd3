"""A simulated clock on which threads and one link run at the same time, each slowed down by the others.

What runs is a generator: it yields :class:`Run` to work on a resource for some milliseconds, or a :class:`Signal` to
wait for it. Transfers on the link take their turn in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

__all__ = ["COMPUTE", "LINK", "WORKER", "Clock", "Process", "Rates", "Run", "Signal"]

COMPUTE, WORKER, LINK = "compute", "worker", "link"
# Less than this is left of a job by rounding alone.
_NOTHING_MS = 1e-9


@dataclass(frozen=True)
class Run:
    """Work on a resource that takes ``ms`` where nothing else runs."""

    resource: str
    ms: float


@dataclass(eq=False)
class Signal:
    """Something that happens once."""

    is_set: bool = False
    _waiting: list[Process] = field(default_factory=list)


Process = Generator[Run | Signal, None, None]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast each resource is beside others, as a share of its speed alone."""

    compute_beside_link: float = 1.0
    """Of both threads, while something is sent."""
    link_beside_compute: float = 1.0
    """Of the link, while a thread computes."""
    link_delay_ms: float = 0.0
    """How much longer each transfer takes besides, while a thread computes: who carries it must get a core."""
    threads: float = 1.0
    """Of each of two threads that compute at the same time: 0.5 where they share a core."""

    def of(self, resource: str, running: frozenset[str], *, transfer_ms: float = 0.0) -> float:
        """The speed of ``resource``, one of those ``running``; what is sent would take ``transfer_ms`` alone."""
        if resource == LINK:
            if not running & {COMPUTE, WORKER}:
                return 1.0
            if not self.link_delay_ms:
                return self.link_beside_compute
            return transfer_ms / (self.link_delay_ms + transfer_ms / self.link_beside_compute)
        rate = self.compute_beside_link if LINK in running else 1.0
        return rate * self.threads if running >= {COMPUTE, WORKER} else rate


class Clock:
    """Runs processes until none can go on."""

    def __init__(self, rates: Rates | None = None) -> None:
        self.now_ms = 0.0
        self._rates = rates or Rates()
        self._ready: deque[Process] = deque()
        # Of each resource: what is left of its job, and what to do then.
        self._running: dict[str, tuple[float, Callable[[], None]]] = {}
        self._queued: deque[tuple[float, Signal]] = deque()
        self._transfer_ms = 0.0

    def start(self, process: Process) -> None:
        self._ready.append(process)

    def set(self, signal: Signal) -> None:
        """Those who wait for ``signal`` go on."""
        signal.is_set = True
        self._ready.extend(signal._waiting)
        signal._waiting.clear()

    def send(self, ms: float, *, is_ahead: bool = False) -> Signal:
        """Queue a transfer that takes ``ms``, before what is queued if it is to go ahead; the signal is set when it is
        done."""
        done = Signal()
        if is_ahead:
            self._queued.appendleft((ms, done))
        else:
            self._queued.append((ms, done))
        self._feed_link()
        return done

    def run(self) -> None:
        """Until nothing runs and nothing is ready."""
        while True:
            while self._ready:
                self._resume(self._ready.popleft())
            if not self._running:
                return
            self._advance()

    def _resume(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if wanted.is_set:
                    continue
                wanted._waiting.append(process)
                return
            if wanted.ms > _NOTHING_MS:
                assert wanted.resource not in self._running, f"two processes use {wanted.resource}"
                self._running[wanted.resource] = wanted.ms, partial(self._ready.append, process)
                return

    def _advance(self) -> None:
        running = frozenset(self._running)
        rates = {name: self._rates.of(name, running, transfer_ms=self._transfer_ms) for name in running}
        passed_ms = min(left_ms / rates[resource] for resource, (left_ms, _) in self._running.items())
        self.now_ms += passed_ms
        for resource, (left_ms, then) in list(self._running.items()):
            still_ms = left_ms - passed_ms * rates[resource]
            if still_ms > _NOTHING_MS:
                self._running[resource] = still_ms, then
            else:
                del self._running[resource]
                then()

    def _feed_link(self) -> None:
        while self._queued and LINK not in self._running:
            ms, done = self._queued.popleft()
            if ms > _NOTHING_MS:
                self._transfer_ms = ms
                self._running[LINK] = ms, partial(self._sent, done)
            else:
                self.set(done)

    def _sent(self, done: Signal) -> None:
        self.set(done)
        self._feed_link()
