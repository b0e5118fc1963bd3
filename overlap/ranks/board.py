"""How the ranks of a group talk to each other apart from their collectives: they agree, report, and poll.

[Note: the board]

A rank that fails issues no more collectives, and the others would wait for it in theirs up to the group's timeout. So
ranks talk in the key-value store that the group was made with:

- Before ranks issue collectives together (to register a chain, to build a ZeroRedundancyOptimizer) they *agree*: each
  writes a small value, or the error that it raises instead, and reads those of the others. Those that come for
  different purposes learn of it there.
- A rank that fails later *reports* its error on the board of its connections, which it then closes, if they are the
  library's own, or on that of its Join.
- A rank that waits *polls* that board about once a second, and raises a :class:`PeerError` with the failed rank and its
  words. Where a collective fails and the board is empty, as after a kill, the backend's error says so.

Boards are named by what is the same on every rank: how often ranks have agreed on the group, and how often a
registration has connected. So an old report is never taken for a new one, and nothing is ever taken back. When
ranks have agreed, all have left the boards that they used before in the program's order, and each deletes what it wrote
there. What a registration wrote to connect stays: some hundred bytes a rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from overlap._torch.c10d import PrefixStore, backend_name, group_timeout
from overlap._torch.gloo import has_lost_connection
from overlap._torch.stores import GroupStore
from overlap.errors import CollectiveError, PeerError

__all__ = ["Agreement", "Board", "agree", "explain", "explained", "is_reported", "is_lost_connection"]

# The pause between two looks at the store: a tenth of the wait so far, within these limits.
_PAUSES_S = (0.0005, 0.05)
# How long the rank that has caused a lost connection may take to say so.
_REPORTING_S = 1.0
_FAILED, _PURPOSE = "failed", "purpose"
_NO_REPORT = "no rank has reported an error"
# On an error itself: it may be raised through a block that would report it again.
_REPORTED = "_reported_to_other_ranks"

# How often this process has agreed on a group: as often as every rank, so the number names the board.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
# The board of the Join whose block this process is in.
_watched: weakref.WeakKeyDictionary[dist.ProcessGroup, Board] = weakref.WeakKeyDictionary()
# All of this process.
_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[Board]] = weakref.WeakKeyDictionary()
# Boards that this rank has left: all have when they agree again.
_left: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Board]] = weakref.WeakKeyDictionary()


class Board:
    """What the ranks of ``group`` write for each other under one name. See [Note: the board].

    Args:
        group: whose ranks.
        name: the same on every rank; no other board of the group has it.
        event: what a report means, in the words of a PeerError, as in "another rank failed under Join".
        beside: another board on which a failure is looked for, too; by default the group's watched one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        *,
        event: str = "of the group failed first",
        beside: Board | None = None,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.timeout = group_timeout(group, torch.device("cpu"))
        self._group, self._event, self._beside = weakref.ref(group), event, beside
        self._prefix = f"overlap/{name}"
        self._connection = GroupStore.of(group)
        self._store = self._connection.under(self._prefix)
        self._written: list[str] = []
        self.disconnect: weakref.WeakMethod[Callable[[], None]] | None = None
        """Called where the block of a Join has failed, in which ranks may have abandoned this board's connections."""
        _boards.setdefault(group, weakref.WeakSet()).add(self)

    def store(self, name: str) -> PrefixStore:
        """A store for a backend that connects the ranks, under ``name``."""
        return self._connection.under(f"{self._prefix}/{name}")

    def report(self, error: BaseException) -> None:
        """Write that this rank has failed; the first report stays. Never raises: the error itself matters more."""
        with contextlib.suppress(Exception):
            setattr(error, _REPORTED, True)
            self.write_first(_FAILED, f"rank {self.rank}: {_one_line(error)}")

    def failure(self) -> str | None:
        """The first report: the rank and its error. ``None`` without one, or where the store cannot be read."""
        with contextlib.suppress(Exception), self._reached():
            if self._store.check([_FAILED]):
                text: str = self._store.get(_FAILED).decode()
                return text
        group = self._group()
        beside = self._beside or (None if group is None else _watched.get(group))
        return None if beside is None or beside is self else beside.failure()

    def peer_error(self, *, within_s: float = 0.0) -> PeerError | None:
        """The error to raise where a rank has reported a failure, or does so within ``within_s``."""
        deadline_s = time.monotonic() + within_s
        while (failure := self.failure()) is None:
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_PAUSES_S[1])
        return PeerError(f"another rank {self._event}: {failure}")

    def poll(self) -> None:
        """Called about once a second while this rank waits. Raises: PeerError: another rank has failed."""
        if (error := self.peer_error()) is not None:
            raise error

    def write(self, key: str, value: Any) -> None:
        """Write ``value``, which JSON can hold. Raises: CollectiveError: the store cannot be reached."""
        self._written.append(key)
        with self._reached():
            self._store.set(key, json.dumps(value))

    def write_first(self, key: str, text: str) -> str:
        """Write ``text``, unless another rank has written under ``key`` before; returns the text of the first."""
        with self._reached():
            first: str = self._store.compare_set(key, "", text).decode()
        if first == text:
            self._written.append(key)
        return first

    def delete(self, *, kept: int = 0) -> None:
        """Delete what this rank has written, but for the last ``kept`` keys. Never raises: the host may have ended."""
        over = self._written[: max(0, len(self._written) - kept)]
        self._written = self._written[len(over) :]
        with contextlib.suppress(RuntimeError):
            for key in over:
                self._store.delete_key(key)

    def watch(self) -> None:
        """Have every other board of the group look here, too, until this rank leaves: the block of a Join begins."""
        if (group := self._group()) is not None:
            _watched[group] = self

    def leave(self, *, has_failed: bool = False) -> None:
        """Called where this rank uses the board no more: what it wrote is deleted when all ranks agree again.

        With ``has_failed`` the connections of the group's other boards are made anew.
        """
        if (group := self._group()) is not None:
            for board in list(_boards[group]) if has_failed else ():
                if board.disconnect is not None and (disconnect := board.disconnect()) is not None:
                    disconnect()
            _left.setdefault(group, []).append(self)
            if _watched.get(group) is self:
                del _watched[group]

    def read(self, keys: Sequence[str], *, late: Callable[[Sequence[str]], str]) -> list[Any]:
        """The values under ``keys``, once all are there.

        Raises:
            PeerError: another rank has failed.
            CollectiveError: they are not there within the group's timeout; ``late`` says so of the missing keys.
        """
        start_s = time.monotonic()
        with self._reached():
            while not self._store.check(list(keys)):
                error = self.peer_error()
                # A rank that has come, and failed later, has left what is waited for.
                if error is not None and not self._store.check(list(keys)):
                    raise error
                waited_s = time.monotonic() - start_s
                if error is None and waited_s > self.timeout.total_seconds():
                    raise CollectiveError(late([key for key in keys if not self._store.check([key])]))
                shortest_s, longest_s = _PAUSES_S
                time.sleep(min(shortest_s + waited_s / 10, longest_s))
            return [json.loads(self._store.get(key)) for key in keys]

    def gather(self, what: str, value: Any, *, purpose: str) -> list[Any]:
        """Wait until every rank has written a ``value``, which JSON can hold; returns those of all ranks.

        Raises:
            PeerError, CollectiveError: as :meth:`read`; ``purpose`` ends the sentence.
        """
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self.write(keys[self.rank], value)

        def late(missing: Sequence[str]) -> str:
            ranks = [rank for rank, key in enumerate(keys) if key in missing]
            return (
                f"rank {self.rank} could not connect with the other ranks in {self.timeout.total_seconds():.0f} s: "
                f"ranks {ranks} did not come{purpose}"
            )

        return self.read(keys, late=late)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            self._connection.close()
            raise CollectiveError(
                f"rank {self.rank} cannot reach the process group's store: rank 0 of the job, which hosts it, has "
                f"ended, hangs or is cut off: {str(error).splitlines()[0]}"
            ) from error


class Agreement:
    """Lets a mistake on one rank be an error on all, at once, where the others would wait for it in a collective::

        with Agreement(group, "make a ZeroRedundancyOptimizer") as agreement:
            ...  # May raise on this rank alone.
            of_ranks = agreement.agree(value)
            ...  # Collectives.

    Args:
        group: whose ranks; all of them do this, in the same order with other agreements. Issues no collective.
        purpose: what all are about to do, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self.rank, self.size, self._purpose = group.rank(), group.size(), purpose
        self._group = group
        self._rounds = itertools.count()
        self.name = f"agreement/{next(_agreed.setdefault(group, itertools.count()))}"
        """Of its board: no other agreement of the group has it."""
        self._board: Board | None = None
        if self.size > 1 and _has_peers(group):
            self._board = Board(group, self.name, event=f"failed where all {purpose}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._board is None:
            return
        self._board.leave()
        if error is None or isinstance(error, PeerError):
            return
        # This may be the effect of another rank's failure, whose own error says more.
        if is_lost_connection(error) and (cause := self._board.peer_error(within_s=_REPORTING_S)) is not None:
            raise cause from error
        self._board.report(error)

    def agree(self, value: Any = None) -> list[Any]:
        """Wait until all ranks have come, each with a ``value`` that JSON can hold; returns that of every rank.

        Raises:
            PeerError: another rank has raised; the message has its number and its error.
            CollectiveError: another rank comes for another purpose, or did not come within the group's timeout.
        """
        board = self._board
        if board is None:
            return [json.loads(json.dumps(value))] * self.size
        number = next(self._rounds)
        if number == 0:
            self._compare_purposes(board)
        purpose = f" to {self._purpose}; every rank of the process group must do the same, in the same order"
        found = board.gather(str(number), value, purpose=purpose)
        for former in _left.pop(self._group, []):
            former.delete()
        return found

    def from_rank_0(self, value: Any) -> Any:
        """The ``value`` of rank 0, on all. Raises: as :meth:`agree`."""
        return self.agree(value)[0]

    def _compare_purposes(self, board: Board) -> None:
        first, _, purpose = board.write_first(_PURPOSE, f"{board.rank} {self._purpose}").partition(" ")
        if purpose != self._purpose:
            raise CollectiveError(
                f"rank {board.rank} is about to {self._purpose}, and rank {first} to {purpose}: every rank of the "
                "process group must do the same, in the same order"
            )


def agree(group: dist.ProcessGroup, purpose: str, value: Any = None) -> list[Any]:
    """Wait until all ranks of ``group`` have come for this ``purpose``. As :meth:`Agreement.agree`."""
    with Agreement(group, purpose) as agreement:
        return agreement.agree(value)


def is_reported(error: BaseException) -> bool:
    """Whether this rank has reported ``error``, or an error that caused it."""
    found: BaseException | None = error
    while found is not None and not hasattr(found, _REPORTED):
        found = found.__cause__ or found.__context__
    return found is not None


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether ``error``, or an error that caused it, is of a backend that has lost a connection."""
    while error is not None and not has_lost_connection(error):
        error = error.__cause__
    return error is not None


def explained(error: Exception, what: str, board: Board | None = None) -> CollectiveError:
    """What to raise where a collective failed with ``error``: the rank that reported its own, if there is one."""
    if board is not None and (cause := board.peer_error()) is not None:
        return cause
    return CollectiveError(f"a collective {what}, and {_NO_REPORT}: {error}")


def explain(error: BaseException, board: Board | None) -> None:
    """Note on an ``error`` of DDP's own collectives which rank caused it, as far as that was reported on ``board``."""
    if isinstance(error, CollectiveError) or not has_lost_connection(error):
        return
    cause = None if board is None else board.peer_error()
    error.add_note(_NO_REPORT if cause is None else str(cause))


def _has_peers(group: dist.ProcessGroup) -> bool:
    """Whether other processes are behind ``group``, and agree by its store: PyTorch's "fake" backend only pretends to
    have some, and the members of a group with a channel of its own come and go."""
    if hasattr(group, "overlap_channel"):
        return False
    return "fake" not in (group.name(), backend_name(group, torch.device("cpu")))


def _one_line(error: BaseException) -> str:
    notes = " ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error} {notes}".split())
