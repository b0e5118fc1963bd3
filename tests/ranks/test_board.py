"""What a rank reports on a board, and what the others make of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from overlap import CollectiveError, PeerError
from overlap.ranks import board as boards_of_ranks
from overlap.ranks.board import Board, add_peer_note, as_collective_error

_LOST = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Timed out")


class _Group:
    """One rank's view of a group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError("no backend")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three ranks' views of one group, whose store is in memory."""
    store = dist.HashStore()
    monkeypatch.setattr(boards_of_ranks, "group_store", lambda group: store)
    return [_Group(rank, 3) for rank in range(3)]


def test_the_first_report_is_raised_on_the_others(groups: list[Any]) -> None:
    boards = [Board(group, "0") for group in groups]
    boards[0].poll()
    error = ValueError("the dog\nate it")
    error.add_note("raised in stage Log()")
    boards[2].report(error)
    boards[1].report(RuntimeError("and the cat"))
    with pytest.raises(PeerError) as caught:
        boards[0].poll()
    assert str(caught.value) == (
        "another rank of the group failed first: rank 2: ValueError: the dog ate it raised in stage Log()"
    )
    Board(groups[0], "1").poll()


def test_a_report_on_the_fallback_board_is_found(groups: list[Any]) -> None:
    first, second = Board(groups[0], "0"), Board(groups[1], "0")
    part = Board(groups[1], "of some ranks", fallback_board=second)
    first.report(ValueError("the dog ate it"))
    with pytest.raises(PeerError, match="rank 0: ValueError: the dog ate it"):
        part.poll()


def test_a_report_in_the_block_of_a_join_is_found_until_it_is_closed(groups: list[Any]) -> None:
    of_join, other = Board(groups[0], "join/0", event="failed under Join"), Board(groups[0], "0")
    of_join.watch()
    other.poll()
    Board(groups[1], "join/0").report(ValueError("the dog ate it"))
    with pytest.raises(PeerError, match="rank 1: ValueError: the dog ate it"):
        other.poll()
    of_join.close()
    other.poll()


def test_the_backends_error_says_that_no_rank_has_reported_one(groups: list[Any]) -> None:
    board = Board(groups[0], "0")
    assert (
        str(as_collective_error(_LOST, "failed", board))
        == f"a collective failed, and no rank has reported an error: {_LOST}"
    )
    lost, other, ours = RuntimeError(*_LOST.args), RuntimeError("a shape is wrong"), CollectiveError(*_LOST.args)
    for error in (lost, other, ours):
        add_peer_note(error, board)
    assert lost.__notes__ == ["no rank has reported an error"]
    assert not hasattr(other, "__notes__") and not hasattr(ours, "__notes__")
    Board(groups[1], "0").report(ValueError("the dog ate it"))
    assert isinstance(as_collective_error(_LOST, "failed", board), PeerError)
    add_peer_note(lost, board)
    assert lost.__notes__[1].endswith("rank 1: ValueError: the dog ate it")


_HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""
_TIMEOUT_S = 1.5


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_no_call_outlasts_the_groups_timeout_where_the_host_hangs(
    host: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), None, False)
    monkeypatch.setattr(boards_of_ranks, "group_store", lambda group: dist.PrefixStore("default", store))
    monkeypatch.setattr(boards_of_ranks, "group_timeout", lambda group, device: timedelta(seconds=_TIMEOUT_S))
    group: Any = _Group(0, 2)
    board = Board(group, "0")
    board.write("key", "text")
    assert store.get("default/overlap/0/key") == b'"text"', "the same store, over another connection"
    host.send_signal(signal.SIGSTOP)
    os.waitpid(host.pid, os.WUNTRACED)
    start_s = time.monotonic()
    board.poll()
    assert _TIMEOUT_S / 2 < time.monotonic() - start_s < _TIMEOUT_S + 5
    host.send_signal(signal.SIGCONT)
    start_s = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 0 of the job, which hosts it, has ended, hangs or is cut off"):
        board.write("key", "another")
    board.report(ValueError("the dog ate it"))
    assert time.monotonic() - start_s < 1.0
    assert store.get("default/overlap/0/key") == b'"text"', "the connection of the process group is as it was"
