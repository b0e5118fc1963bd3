"""Calls on a process group's store end in time, and one store that hangs keeps nobody from another."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap._torch import stores
from overlap._torch.store_connection import StoreConnection
from overlap._torch.stores import BoundedStore, host_has_ended
from overlap.errors import CollectiveError
from overlap.join import failures
from overlap.join.failures import FailureStore


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[dist.Store], BoundedStore]:
    """The store in the place of a group's."""
    monkeypatch.setattr(stores, "group_store", lambda store: store)
    monkeypatch.setattr(stores, "group_timeout", lambda store, device: timedelta(seconds=60))
    made: Any = BoundedStore
    return lambda store: made(store, "test")


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """What a stuck call waits for."""
    goes_on = threading.Event()
    yield goes_on
    goes_on.set()


def _tcp_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


def _get_stuck(store: BoundedStore, hanging: threading.Event) -> None:
    with pytest.raises(CollectiveError, match="did not answer"):
        store.within(0.05, lambda _: hanging.wait())


def test_a_store_that_hangs_keeps_nobody_from_another(bounded: Any, hanging: threading.Event) -> None:
    silent, healthy = bounded(_tcp_store()), bounded(_tcp_store())
    _get_stuck(silent, hanging)
    healthy.within(5.0, lambda store: store.set("key", "text"))
    assert healthy.within(5.0, lambda store: store.get("key")) == b"text"


def test_calls_behind_a_stuck_one_end_in_time_and_are_not_made_later(bounded: Any, hanging: threading.Event) -> None:
    root, made = _tcp_store(), []
    _get_stuck(bounded(root), hanging)
    store, start_s = bounded(root), time.monotonic()
    with pytest.raises(CollectiveError, match="did not answer"):
        store.within(0.1, lambda _: made.append("late"))
    assert time.monotonic() - start_s < 2.0
    hanging.set()
    store.within(5.0, lambda _: made.append("answered"))
    assert made == ["answered"]


def test_a_store_that_has_been_silent_is_not_waited_for_a_whole_time_again(
    bounded: Any, hanging: threading.Event
) -> None:
    store = bounded(_tcp_store())
    with pytest.raises(CollectiveError):
        store.within(1.0, lambda _: hanging.wait())
    start_s = time.monotonic()
    for _ in range(4):
        with pytest.raises(CollectiveError, match="did not answer"):
            store.within(1.0, lambda _: None)
    assert time.monotonic() - start_s < 1.0
    hanging.set()
    assert store.within(5.0, lambda _: "answered") == "answered"


def test_threads_that_wait_for_a_stuck_call_are_all_answered_after_it(bounded: Any, hanging: threading.Event) -> None:
    store = bounded(_tcp_store())
    _get_stuck(store, hanging)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(store.within, 5.0, lambda _, number=number: number) for number in range(6)]
        time.sleep(0.05)
        hanging.set()
        assert [answer.result() for answer in answers] == list(range(6))


def test_a_connection_of_which_nothing_is_acknowledged_is_given_up_after_the_groups_timeout() -> None:
    stores_made = [_tcp_store() for _ in range(2)]
    StoreConnection(stores_made[0]).limit_silence(7.5)
    limited = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(entry.stat().st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as found:
                    if found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500:
                        limited.append(found.getpeername()[1])
    assert limited == [stores_made[0].port]
    assert not host_has_ended(dist.DistNetworkError("Failed to recv: Connection timed out"))
    assert host_has_ended(dist.DistNetworkError("Failed to recv, got 0 bytes"))


def test_a_connection_that_is_cut_ends_the_call_that_waits(bounded: Any) -> None:
    root = _tcp_store()
    store, threads = bounded(root), []
    with pytest.raises(CollectiveError, match="did not answer"):
        store.within(0.2, lambda stuck: threads.append(threading.current_thread()) or stuck.get("nobody sets it"))
    StoreConnection(root).cut()
    threads[0].join(5.0)
    assert not threads[0].is_alive()


_STUCK_AT_THE_END = """
import datetime, os, subprocess, sys, time
import torch.distributed as dist
from overlap._torch import stores

HOST = '''
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
'''
host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), None, False, wait_for_workers=False)
stores.group_store = lambda group: group
stores.group_timeout = lambda group, device: datetime.timedelta(seconds=60)
try:
    stores.BoundedStore(store, "test").within(0.2, lambda root: root.get("nobody sets it"))
except stores.CollectiveError:
    print("stuck", flush=True)


class Late:
    def __init__(self):
        self.kill, self.sleep, self.pid = os.kill, time.sleep, host.pid

    def __del__(self):
        self.kill(self.pid, 9)
        self.sleep(0.5)


sys.modules["late"] = Late()  # Dropped when the interpreter goes.
"""


def test_a_call_that_is_stuck_when_the_script_ends_does_not_abort_it() -> None:
    done = subprocess.run([sys.executable, "-c", _STUCK_AT_THE_END], capture_output=True, text=True, check=False)
    assert done.stdout == "stuck\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_what_is_posted_is_there_for_the_next_call(bounded: Any) -> None:
    store = bounded(_tcp_store())
    for number in range(200):
        store.post(5.0, lambda root, number=number: root.set("number", str(number)))
    assert store.within(5.0, lambda root: root.get("number")) == b"199"


def test_what_fails_when_posted_fails_every_later_call(bounded: Any) -> None:
    root = _tcp_store()
    store, other = bounded(root), bounded(root)

    def fail(_: dist.Store) -> None:
        raise RuntimeError("no room")

    store.post(5.0, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            store.within(5.0, lambda _: None)
    with pytest.raises(RuntimeError, match="no room"):
        store.post(5.0, lambda _: None)
    other.within(5.0, lambda _: None)


def test_posting_to_a_store_that_hangs_ends_in_time(bounded: Any, hanging: threading.Event) -> None:
    store = bounded(_tcp_store())

    def post() -> None:
        for _ in range(1000):
            store.post(0.1, lambda _: hanging.wait())

    with pytest.raises(CollectiveError, match="did not answer"):
        post()


def test_a_thread_that_was_stuck_is_replaced_by_one_that_the_end_of_the_script_waits_for(
    bounded: Any, hanging: threading.Event
) -> None:
    store, threads = bounded(_tcp_store()), []
    with pytest.raises(CollectiveError):
        store.within(0.05, lambda _: threads.append(threading.current_thread()) or hanging.wait())
    hanging.set()
    threads[0].join(5.0)
    assert not threads[0].is_alive()
    store.within(5.0, lambda _: threads.append(threading.current_thread()))
    assert threads[0] is not threads[1]


@pytest.mark.parametrize(("error", "said"), [(dist.DistNetworkError("gone"), "has ended"), (RuntimeError(), "hangs")])
def test_ranks_of_which_nothing_is_known_are_not_said_to_be_there(error: Exception, said: str) -> None:
    def fail(*_: Any) -> None:
        raise error

    board: Any = object.__new__(FailureStore)
    board._size, board._store = 2, SimpleNamespace(within=fail, took_s=0.0)
    with pytest.raises(CollectiveError, match=f"rank 0 of the job.*{said}"):
        board.not_stopped(within_s=1.0)


_SLOW_S = 0.2


class _Rank:
    """One rank's view of a group of three."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: 3)

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError("no backend")


@pytest.fixture
def slow_boards(monkeypatch: pytest.MonkeyPatch) -> list[FailureStore]:
    """Those of three ranks, each by a connection of its own to a store that takes longer than anyone waits at first."""
    root, make = _tcp_store(), stores._Call.make
    roots = [root, *(root.clone() for _ in range(2))]  # type: ignore[attr-defined]

    def make_slowly(call: Any) -> None:
        time.sleep(_SLOW_S)
        make(call)

    monkeypatch.setattr(stores._Call, "make", make_slowly)
    monkeypatch.setattr(stores, "group_store", lambda group: roots[group.rank()])
    monkeypatch.setattr(failures, "_PATIENCE_S", _SLOW_S / 4)
    monkeypatch.setattr(failures, "_SURVEY_S", _SLOW_S / 2)
    ranks: list[Any] = [_Rank(rank) for rank in range(3)]
    boards = [FailureStore(rank, "0") for rank in ranks]
    for board, rank in zip(boards, ranks, strict=True):
        board.kept_by_test = rank  # type: ignore[attr-defined]
    return boards


def test_a_slow_store_loses_no_failure(slow_boards: list[FailureStore]) -> None:
    slow_boards[0].report(ValueError("the dog ate it"))
    deadline_s = time.monotonic() + 30
    while (found := slow_boards[1].first()) is None and time.monotonic() < deadline_s:
        pass
    assert found == "rank 0: ValueError: the dog ate it"


def test_with_a_slow_store_no_rank_that_lives_is_taken_for_lost(slow_boards: list[FailureStore]) -> None:
    for board in slow_boards:
        board._store.within(30.0, lambda store: None)  # They know that it is slow.
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(FailureStore.lost_in_words, slow_boards))
    assert [words.partition(" stopped, too")[0] for words in found] == ["ranks 1, 2", "ranks 0, 2", "ranks 0, 1"]


def test_a_slow_store_is_waited_for_longer_than_was_asked(bounded: Any, hanging: threading.Event) -> None:
    store = bounded(_tcp_store())
    with pytest.raises(CollectiveError):
        store.within(0.05, lambda _: hanging.wait(0.3))
    assert store.within(5.0, lambda _: "answered") == "answered"
    store.within(5.0, lambda _: hanging.wait(0.3))
    assert store.took_s > 0.25
    assert store.within(0.05, lambda _: hanging.wait(0.3) or "late") == "late"


def test_what_is_told_to_a_store_that_does_not_answer_is_told_when_it_does(
    bounded: Any, hanging: threading.Event
) -> None:
    store, other = (bounded(root) for root in [_tcp_store()] * 2)
    _get_stuck(store, hanging)
    start_s = time.monotonic()
    other.tell(0.1, lambda root: root.set("failure", "the dog ate it"))
    assert time.monotonic() - start_s < 5.0
    hanging.set()
    assert store.within(30.0, lambda root: root.get("failure")) == b"the dog ate it"
