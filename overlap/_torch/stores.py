"""The key-value stores of process groups, with a deadline for every call.

[Note: a store that hangs]

Rank 0 hosts the usual store, a ``TCPStore``. When its process hangs, a call of another rank blocks for ever, whatever
its timeout: only the server ends a wait that has timed out. So a thread makes the calls, and whoever needs an answer
waits for the thread. Each store has one such thread, since the store's client makes one call at a time: while a call is
stuck no other is made, and calls that nobody waits for any more are never made. Who asks while a call is stuck waits
only until the store has been silent for as long as it would wait for an answer, since a rank asks several times before
it gives up. Where packets vanish the connection is given up after the group's timeout, which ends the stuck call.

A store may be slow, and not hang: then whoever asks waits for three times as long as the last call took (for one that
was given up, for the answer, and for chance), so that an answer is not given up again and again just before it comes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# The package exports these at run time, but not to type checkers.
from torch._C._distributed_c10d import FileStore, HashStore

from overlap._threads import forget, start
from overlap._torch.c10d import PrefixStore, Store, group_store, group_timeout
from overlap._torch.store_connection import StoreConnection
from overlap.errors import CollectiveError

__all__ = ["BoundedStore", "SilentStoreError", "host_has_ended", "peek"]

T = TypeVar("T")

# Writes that nobody waits for, at most so many.
_WAITING_WRITES = 64
# No key has this value.
_NOTHING = "?"
# How long a thread waits for the next call before it ends.
_IDLE_S = 0.2
# In the error of a connection of which nothing has been acknowledged for too long.
_CUT_OFF = "Connection timed out"
# How long to wait at least, for a store that has just begun to answer again.
_SHORTEST_S = 0.05
# How long to wait for a store because it is slow: so many times the last call, and at most so long.
_SLOWNESS = 3
_SLOWEST_S = 10.0


class SilentStoreError(CollectiveError):
    """A store did not answer in time."""


class BoundedStore:
    """The store of ``group``, or the one that is given, under ``prefix``.

    Args:
        group: the process group, or a store.
        prefix: of all keys.
        shares_thread: ``False`` for calls that wait for other ranks: those of others do not wait for them.
    """

    def __init__(self, group: dist.ProcessGroup | Store, prefix: str, *, shares_thread: bool = True) -> None:
        store = group if isinstance(group, Store) else group_store(group)
        self._store = PrefixStore(prefix, store)
        # Kept, since the callers are found by it.
        self._root = _root(store)
        self._may_hang = not isinstance(self._root, (FileStore, HashStore))
        self._caller = _caller_of(self._root, group) if shares_thread else _Caller(StoreConnection(self._root))
        self._failures: list[BaseException] = []

    def within(self, seconds: float, call: Callable[[Store], T]) -> T:
        """``call(store)``, after what was posted. See [Note: a store that hangs].

        Raises:
            CollectiveError: there is no answer after so many ``seconds``.
            RuntimeError: what was posted here has failed.
        """
        if not self._may_hang:
            return call(self._store)
        answers: list[T] = []
        made = _Call(lambda: answers.append(call(self._store)))
        self._caller.make(made, seconds)
        self._raise_failure()
        if made.error is not None:
            raise made.error
        return answers[0]

    def post(self, seconds: float, call: Callable[[Store], object]) -> None:
        """``call(store)``, without waiting for it. If it fails, every later call here raises its error.

        Raises:
            CollectiveError: too much was posted before and is not done after so many ``seconds``.
            RuntimeError: what was posted here before has failed.
        """
        if not self._may_hang:
            call(self._store)
            return
        self._raise_failure()
        self._caller.post(_Call(lambda: call(self._store), self._failures.append), seconds)

    def tell(self, seconds: float, call: Callable[[Store], object]) -> None:
        """``call(store)``, waiting so many ``seconds`` until it is done; a store that is slow does it later.

        Raises:
            CollectiveError: too much was posted before and is not done after so many ``seconds``.
        """
        if not self._may_hang:
            call(self._store)
            return
        made = _Call(lambda: call(self._store))
        self._caller.post(made, seconds)
        self._caller.wait(made, seconds)

    @property
    def took_s(self) -> float:
        """How long the store has taken for the last call that it has answered."""
        return self._caller.took_s

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]


def host_has_ended(error: BaseException) -> bool:
    """Whether a store's call has raised ``error`` because the process that hosts the store has ended."""
    return isinstance(error, dist.DistNetworkError) and _CUT_OFF not in str(error)


def peek(store: Store, key: str) -> str | None:
    """The value of ``key``, or ``None`` where there is none: never waits, as ``get`` does.

    One call, so that another process cannot delete the key in between: of a key that is not there ``compare_set``
    returns the value that it was to compare with, and sets nothing.
    """
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if found == _NOTHING else found


def _root(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class _Call:
    def __init__(self, run: Callable[[], object], failed: Callable[[BaseException], object] | None = None) -> None:
        self._run, self._failed = run, failed
        self.is_done = threading.Event()
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
            if self._failed is not None:
                self._failed(error)
        self.is_done.set()


class _Phase(Enum):
    """What the thread of a :class:`_Caller` does."""

    NONE = auto()
    """There is no thread: the next call starts one."""

    READY = auto()
    """It waits for a call."""

    CALLING = auto()
    """It makes a call."""

    STUCK = auto()
    """It makes a call that somebody has given up, and the end of the script does not wait for it: so it ends when the
    call does, and another thread makes the calls that wait."""


class _Caller:
    """Makes calls one at a time, in their order, in a thread that ends when there are none for a while."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._phase = _Phase.NONE
        self._thread: threading.Thread | None = None
        self._idle_s = _IDLE_S
        self._begun_s = 0.0
        self.took_s = 0.0
        """Of the last call that was answered."""

    def make(self, call: _Call, seconds: float) -> None:
        """Make ``call`` and wait for it. Raises: CollectiveError: it is not done in time."""
        with self._changed:
            self._put(call)
        if self.wait(call, seconds):
            return
        with self._changed:
            if call.is_done.is_set():
                return
            if call in self._waiting:
                self._waiting.remove(call)
            if self._phase is _Phase.CALLING and self._thread is not None:
                self._phase = _Phase.STUCK
                forget(self._thread, abandon=self._connection.cut)
        raise _silent(seconds)

    def wait(self, call: _Call, seconds: float) -> bool:
        """Whether ``call`` is done in time. See [Note: a store that hangs]."""
        with self._changed:
            patience_s = max(seconds, min(_SLOWNESS * self.took_s, _SLOWEST_S))
            if self._phase is _Phase.STUCK:
                silent_s = time.monotonic() - self._begun_s
                patience_s = max(patience_s - silent_s, _SHORTEST_S)
        return call.is_done.wait(patience_s)

    def post(self, call: _Call, seconds: float) -> None:
        """Have ``call`` made. Raises: CollectiveError: there is no room for it in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) < _WAITING_WRITES, seconds):
                raise _silent(seconds)
            self._put(call)

    def _put(self, call: _Call) -> None:
        self._waiting.append(call)
        if self._thread is None or not self._thread.is_alive():  # It is not in a process forked since.
            self._start()
        else:
            self._changed.notify_all()

    def _start(self) -> None:
        self._phase = _Phase.READY
        starter = threading.current_thread()

        def work() -> None:
            # The starter itself where no thread can be started any more: it waits for no other calls.
            waits = threading.current_thread() is not starter
            while (call := self._next(self._idle_s if waits else 0.0)) is not None:
                call.make()
                self.took_s = time.monotonic() - self._begun_s
                del call  # And with it the store, before waiting.

        self._thread = start(work, "overlap-store", stop=self._end, abandon=self._connection.cut)

    def _next(self, idle_s: float) -> _Call | None:
        """The next call; ``None`` when the thread is to end."""
        with self._changed:
            if self._phase is not _Phase.STUCK:
                self._phase = _Phase.READY
                self._changed.wait_for(lambda: self._waiting or not self._idle_s, idle_s)
                if self._waiting:
                    self._changed.notify_all()
                    self._phase, self._begun_s = _Phase.CALLING, time.monotonic()
                    return self._waiting.popleft()
            self._phase, self._thread = _Phase.NONE, None
            if self._waiting:
                self._start()
            return None

    def _end(self) -> None:
        with self._changed:
            self._idle_s = 0.0
            self._changed.notify_all()


_callers: WeakKeyDictionary[Any, _Caller] = WeakKeyDictionary()
_callers_lock = threading.Lock()


def _caller_of(root: Any, group: dist.ProcessGroup | Store) -> _Caller:
    with _callers_lock:
        if root not in _callers:
            connection = StoreConnection(root)
            if isinstance(group, Store):
                timeout = getattr(group, "timeout")  # noqa: B009 - missing in the stubs
            else:
                timeout = group_timeout(group, torch.device("cpu"))
            connection.limit_silence(timeout.total_seconds())
            _callers[root] = _Caller(connection)
        return _callers[root]


def _silent(seconds: float) -> SilentStoreError:
    return SilentStoreError(
        f"the process group's store did not answer in {seconds:.1f} s; rank 0 of the job, which hosts it, hangs or is "
        "cut off"
    )
