"""How the ranks of a group talk to each other apart from their collectives: they agree, report, and poll.

[Note: the board]

A rank that fails issues no more collectives, and the others would wait for it in theirs up to the group's timeout. So
ranks talk in the key-value store that the group was made with:

- Before ranks issue collectives together (to register a chain, to build a ZeroRedundancyOptimizer) they *agree*: each
  writes a small value, or the error that it raises instead. Rank 0 alone reads them, and answers each rank. Ranks that
  come for different purposes learn of it there.
- A rank that fails later *reports* its error on the board of its connections, which it then closes, if they are the
  library's own, or on that of its Join.
- A rank that waits *polls* that board about once a second, and raises a :class:`PeerError` with the failed rank and its
  words. Where a collective fails and the board is empty, as after a kill, the backend's error says so. On an
  accelerator no host waits in a pass, so none polls: the backend's timeout ends the wait.

Boards are named by numbers that are the same on every rank: how often ranks have agreed on the group, and how often a
registration has connected. So an old report is never taken for a new one, and nothing is ever taken back. A rank that
has its answer deletes it, and its own value, which rank 0 has read by then. The some ten bytes that a
registration or a Join wrote to connect stay.

A rank asks the store equally often whatever their number: the last one to come says that all are there, rank 0 reads
and answers all by one request each, and looks for those that are late when the timeout is over.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import errors
from overlap._torch.c10d import (
    GlooChannel,
    PrefixStore,
    TCPStore,
    backend_name,
    group_store,
    group_timeout,
    has_lost_connection,
)
from overlap.errors import CollectiveError, OverlapError, PeerError

_Result = TypeVar("_Result")
_Calls: TypeAlias = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

_CPU = torch.device("cpu")
# The pause between two polls of the store: a quarter of the wait so far, within these limits.
_PAUSES_S = (0.0005, 0.2)
# How long the rank that has caused a lost connection, or rank 0 when others are late, may take to say so.
_REPORTING_S = 1.0
_FAILED = "failed"
_NO_REPORT = "no rank has reported an error"


class PerRank(list[Any]):
    """The answers to an agreement, in the order of ranks, of which each rank gets its own."""


_Decide = Callable[[list[Any]], Any]


def _decide_nothing(values: list[Any]) -> None: ...


class _Ranks:
    """The parts that the boards of one process group share; made by :meth:`for_group`, once a group.

    The usual store is a ``TCPStore``, which rank 0 or torchrun's agent hosts. A call of its client blocks for as long
    as the host is suspended, whatever its timeout, and so does every other thread that calls that client. So the
    library has a client of its own, and a thread that calls it, which is abandoned when the group's timeout is over.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.timeout = group_timeout(group, _CPU)
        self._store: Any = None
        self._calls: _Calls | None = None
        self._is_lost = False
        self.agreed = itertools.count()
        """How often this process has agreed: as often as every rank, so the number names the board."""
        self.watched: Board | None = None
        """The board of the Join whose block this process is in."""
        self.boards: WeakSet[Board] = WeakSet()

    @staticmethod
    def for_group(group: dist.ProcessGroup) -> _Ranks:
        with _making:
            if (found := _ranks.get(group)) is None:
                found = _ranks[group] = _Ranks(group)
            return found

    def store_of(self, group: dist.ProcessGroup) -> Any:
        """The library's own client of the store. Raises: RuntimeError: it cannot be connected to."""
        with _making:
            if self._store is None:
                store = root = group_store(group)
                while isinstance(root, PrefixStore):
                    root = root.underlying_store
                is_remote = isinstance(root, TCPStore)
                self._store = getattr(store, "clone")() if is_remote else store  # noqa: B009 - not in the stubs
                # Python 3.12 starts no thread when the script has ended.
                with contextlib.suppress(RuntimeError):
                    self._calls = _thread_for(self) if is_remote else None
            return self._store

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call ``function``, which uses the store. Raises: DistNetworkError, TimeoutError: it cannot be reached."""
        if self._calls is None:
            return function()
        if self._is_lost:
            raise TimeoutError("it has not answered before")
        result: Future[_Result] = Future()
        self._calls.put((function, result))
        if not wait([result], min(self.timeout.total_seconds(), threading.TIMEOUT_MAX)).done:
            self._is_lost = True
            raise TimeoutError(f"it has not answered for {self.timeout.total_seconds():.0f} s")
        return result.result()


def _thread_for(ranks: _Ranks) -> _Calls:
    """A thread that makes the calls that are put into the queue that it returns, while there are ``ranks``."""
    calls: _Calls = queue.SimpleQueue()

    def run() -> None:
        while (call := calls.get()) is not None:
            function, result = call
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
            del call, function, result  # They hold the ranks.

    threading.Thread(target=run, name="overlap-store", daemon=True).start()
    # Not at exit, where others may still report an error; without a call it does nothing there.
    weakref.finalize(ranks, calls.put, None).atexit = False
    return calls


_ranks: WeakKeyDictionary[dist.ProcessGroup, _Ranks] = WeakKeyDictionary()
_making = threading.Lock()


class Board:
    """A place where the ranks of ``group`` write for each other, under one name. See [Note: the board].

    Args:
        group: whose ranks.
        name: the same on every rank; no other board of the group has it.
        event: the meaning of a report, in the words of a PeerError, as in "another rank failed under Join".
        fallback_board: where a failure is looked for, too; by default on the group's watched board.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        *,
        event: str = "of the group failed first",
        fallback_board: Board | None = None,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._ranks, self._event, self._fallback = _Ranks.for_group(group), event, fallback_board
        self.timeout = self._ranks.timeout
        self._prefix = f"overlap/{name}"
        self._client = self._ranks.store_of(group)
        self._store: Any = PrefixStore(self._prefix, self._client)
        self.disconnect: WeakMethod[Callable[[], None]] | None = None
        """Called where the block of a Join has failed, in which ranks may have abandoned this board's connections."""
        self._ranks.boards.add(self)

    def report(self, error: BaseException) -> None:
        """Write that this rank has failed; the first report stays. Never raises: the error itself matters more."""
        text = f"rank {self.rank}: {_one_line(error)}"
        with contextlib.suppress(Exception):
            self._write_first(_FAILED, text)

    def failure(self) -> str | None:
        """The first report: the rank and its error. ``None`` without one, or where the store cannot be read."""
        with contextlib.suppress(Exception):
            if (found := self._read(_FAILED)) is not None:
                return found
        fallback = self._fallback or self._ranks.watched
        return None if fallback is None or fallback is self else fallback.failure()

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
        self._call(lambda: self._store.set(key, json.dumps(value)))

    def watch(self) -> None:
        """Have every other board of the group look here, too, until it is closed: the block of a Join begins."""
        self._ranks.watched = self

    def close(self, *, has_failed: bool = False) -> None:
        """This rank watches the board no more; with ``has_failed`` the connections of the group's other boards are made
        anew."""
        for board in list(self._ranks.boards) if has_failed else ():
            if board.disconnect is not None and (disconnect := board.disconnect()) is not None:
                disconnect()
        if self._ranks.watched is self:
            self._ranks.watched = None

    def agree(self, topic: str, value: Any = None, decide: _Decide = _decide_nothing, *, purpose: str) -> Any:
        """As :meth:`Agreement.agree`; ``purpose`` ends the sentence about ranks that are late."""
        self.write(f"{topic}/{self.rank}", value)
        if self._call(lambda: self._store.add(f"{topic}/count", 1)) == self.size:
            self.write(f"{topic}/all", None)
        if self.rank == 0:
            self._answer(topic, decide, purpose)
        kind, answer = json.loads(self._wait_for(f"{self.rank}/answer", topic, purpose))
        mine = [f"{self.rank}", f"{self.rank}/answer", *(() if self.rank else ("count", "all"))]
        with contextlib.suppress(RuntimeError):  # The host may have ended.
            self._call(lambda: [self._store.delete_key(f"{topic}/{key}") for key in mine])
        if kind is not None:
            raise getattr(errors, kind)(answer)
        return answer

    def _answer(self, topic: str, decide: _Decide, purpose: str) -> None:
        self._wait_for("all", topic, purpose)
        keys, kind = [f"{topic}/{rank}" for rank in range(self.size)], None
        try:
            decided = decide([json.loads(text) for text in self._call(lambda: self._store.multi_get(keys))])
        except OverlapError as error:
            kind, decided = type(error).__name__, str(error)
        answers = decided if isinstance(decided, PerRank) else [decided] * self.size
        texts = [json.dumps([kind, answer]) for answer in answers]
        self._call(lambda: self._store.multi_set([f"{key}/answer" for key in keys], texts))

    def _wait_for(self, key: str, topic: str, purpose: str) -> str:
        """The text under ``key`` of the agreement ``topic``, which is there soon after all ranks have come."""
        error: CollectiveError | None = None
        start_s = time.monotonic()
        patience_s = self.timeout.total_seconds() + (_REPORTING_S if self.rank else 0.0)
        while (found := self._read(f"{topic}/{key}")) is None:
            if error is not None:
                raise error
            waited_s = time.monotonic() - start_s
            # A rank that has come, and failed later, has left the text that is waited for: look once more.
            if (error := self.peer_error()) is None and waited_s > patience_s:
                asked = range(1 if self.rank else self.size)
                late = [rank for rank in asked if self._read(f"{topic}/{rank}") is None]
                error = CollectiveError(
                    f"rank {self.rank} could not connect with the other ranks in {self.timeout.total_seconds():.0f} s: "
                    f"ranks {late or [0]} did not come{purpose}"
                )
                self.report(error)
            time.sleep(min(_PAUSES_S[0] + waited_s / 4, _PAUSES_S[1]))
        return found

    def connect(self, name: str, *, purpose: str) -> GlooChannel:
        """Connections of all ranks over Gloo, which find each other under ``name``; raises as :meth:`agree`."""
        # A rank that gives up may have come before a late one, which would wait for it in Gloo, which polls nothing. So
        # the first that knows decides for all: rank 0 that all have come, or a rank that it has given up.
        gives_up = f"rank {self.rank} has given up"

        def all_came(_: list[Any]) -> None:
            if (first := self._write_first("decided", "all came")) != "all came":
                raise self.peer_error() or CollectiveError(
                    f"{first}: it could not connect with the other ranks{purpose}"
                )

        try:
            self.agree("came", decide=all_came, purpose=purpose)
        except CollectiveError:
            if self._write_first("decided", gives_up) != "all came":
                raise
        try:
            store = PrefixStore(f"{self._prefix}/{name}", self._client)
            channel = GlooChannel(store, self.rank, self.size, self.timeout)
        except RuntimeError as error:
            raise as_collective_error(error, "could not connect the ranks", self) from error
        # Gloo returns while others still connect: they would fail if this rank ended before they are done.
        self.agree("connected", purpose=purpose)
        return channel

    def _write_first(self, key: str, text: str) -> str:
        """Write ``text``, unless another rank has written under ``key`` before; returns the text of the first."""
        first: str = self._call(lambda: self._store.compare_set(key, "", text)).decode()
        return first

    def _read(self, key: str) -> str | None:
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def _call(self, function: Callable[[], _Result]) -> _Result:
        try:
            return self._ranks.call(function)
        except (dist.DistNetworkError, TimeoutError) as error:
            raise CollectiveError(
                f"rank {self.rank} cannot reach the process group's store: rank 0 of the job, which hosts it, has "
                f"ended, hangs or is cut off: {str(error).splitlines()[0]}"
            ) from error


class Agreement:
    """Lets a mistake on one rank be an error on all, at once, where the others would wait for it in a collective::

        with Agreement(group, "make a ZeroRedundancyOptimizer") as agreement:
            ...  # May raise on this rank alone.
            answer = agreement.agree(value, decide)
            ...  # Collectives.

    Args:
        group: whose ranks; all of them do this, in the same order with other agreements. Issues no collective.
        purpose: the call that all are about to make, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self.rank, self.size, self._purpose = group.rank(), group.size(), purpose
        self._ranks = _Ranks.for_group(group)
        self._rounds = itertools.count()
        self.name = f"agreement/{next(self._ranks.agreed)}"
        """Of its board: no other agreement of the group has it."""
        self._board: Board | None = None
        if self.size > 1 and _has_peers(group):
            self._board = Board(group, self.name, event=f"failed where all {purpose}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._board is None or error is None or isinstance(error, PeerError):
            return
        # This may be the effect of another rank's failure, whose own error says more.
        if has_lost_connection(error) and (cause := self._board.peer_error(within_s=_REPORTING_S)) is not None:
            raise cause from error
        self._board.report(error)

    def report(self, error: BaseException) -> None:
        """This rank does not come, because of an ``error`` that the ranks of another group have told it of."""
        if self._board is not None:
            self._board.report(error)

    def agree(self, value: Any = None, decide: _Decide = _decide_nothing) -> Any:
        """Wait until all ranks have come, each with a ``value`` that JSON can hold, and rank 0 has decided.

        Args:
            value: this rank's.
            decide: called on rank 0 with the values in the order of ranks; its result, which JSON can hold, is
                returned on every rank (of a :class:`PerRank` each rank's own part), and an error of this library that
                it raises is raised on every rank.

        A rank that need not wait asks the store six times, rank 0 twelve times, and the last to come once more.

        Raises:
            PeerError: another rank has raised; the message has its number and its error.
            CollectiveError: another rank comes for another purpose, or did not come within the group's timeout.
        """
        board = self._board
        if board is None:
            found = decide([json.loads(json.dumps(value))] * self.size)
            return json.loads(json.dumps(found[self.rank] if isinstance(found, PerRank) else found))
        same = "every rank of the process group must do the same, in the same order"

        def decided(of_ranks: list[Any]) -> Any:
            for rank, (purpose, _) in enumerate(of_ranks):
                if purpose != self._purpose:
                    raise CollectiveError(
                        f"rank {rank} is about to {purpose}, and rank {self.rank} to {self._purpose}: {same}"
                    )
            return decide([value for _, value in of_ranks])

        number, purpose = str(next(self._rounds)), f" to {self._purpose}; {same}"
        return board.agree(number, [self._purpose, value], decided, purpose=purpose)


def agree(group: dist.ProcessGroup, purpose: str) -> None:
    """Wait until all ranks of ``group`` have come for this ``purpose``; raises as :meth:`Agreement.agree`."""
    with Agreement(group, purpose) as agreement:
        agreement.agree()


def as_collective_error(error: Exception, event: str, board: Board | None = None) -> CollectiveError:
    """The error to raise where a collective failed with ``error``: the rank that reported its own, if there is one."""
    if board is not None and (cause := board.peer_error()) is not None:
        return cause
    return CollectiveError(f"a collective {event}, and {_NO_REPORT}: {error}")


def add_peer_note(error: BaseException, board: Board | None) -> None:
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


# Collectives on a process group itself, outside of the stages.


@contextlib.contextmanager
def failures_explained() -> Iterator[None]:
    """For collectives on a group itself. Raises: CollectiveError: one of them has lost a connection."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError) or not has_lost_connection(error):
            raise
        raise as_collective_error(error, "failed") from error


def group_all_reduce(tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup) -> None:
    """Reduce ``tensor`` over the group, in place on every rank.

    Raises:
        CollectiveError: a rank is lost.
    """
    with failures_explained():
        dist.all_reduce(tensor, op=op, group=group)


def group_broadcast(tensor: Tensor, *, src: int, group: dist.ProcessGroup) -> None:
    """Copy ``tensor`` of rank ``src`` of the group to every rank, in place; raises as :func:`group_all_reduce`."""
    with failures_explained():
        dist.broadcast(tensor, group=group, group_src=src)


def of_all_ranks(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The ``value`` of every rank, in the order of ranks, on every rank; raises as :func:`group_all_reduce`."""
    everyone: list[Any] = [None] * group.size()
    with failures_explained():
        dist.all_gather_object(everyone, value, group=group)
    return everyone
