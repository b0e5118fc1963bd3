"""How ranks tell each other that they failed."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from overlap._torch.c10d import Store, group_timeout
from overlap._torch.gloo import has_lost_connection
from overlap._torch.stores import BoundedStore, SilentStoreError, host_has_ended, peek
from overlap.errors import CollectiveError
from overlap.join.active import ActiveJoin, active_join
from overlap.join.leftovers import leave, leave_released, release

__all__ = ["FailureStore", "explain_loss", "failures_on", "loss_on", "losses_named", "was_told"]

# How long to wait for the store where nothing depends on its answer.
_PATIENCE_S = 1.0
# How long a rank that has lost a connection waits for word of the others that live.
_SURVEY_S = 1.5
_ASKING_S = 0.02
# Calls of the store that such a rank makes first.
_CALLS = 8
# Of what has no connections of its own, and of all that stops.
_GROUP = "group"
# On an error itself: it may be raised through a block that would tell of it again.
_TOLD = "_told_to_other_ranks"


def failures_on(group: dist.ProcessGroup) -> FailureStore:
    """Where ranks tell each other of collectives on ``group`` itself."""
    return FailureStore(group, _GROUP)


def was_told(error: BaseException) -> bool:
    """Whether this rank has told the others of ``error``, or of what it came from."""
    found: BaseException | None = error
    while found is not None and not hasattr(found, _TOLD):
        found = found.__cause__ or found.__context__
    return found is not None


@contextlib.contextmanager
def losses_named(group: dist.ProcessGroup) -> Iterator[None]:
    """For collectives on ``group`` itself.

    Raises:
        CollectiveError: one of them has failed since a rank is lost; the message says which.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError) or not has_lost_connection(error):
            raise
        raise loss_on(group, error) from error


def loss_on(group: dist.ProcessGroup, error: Exception) -> CollectiveError:
    """What to raise where a collective on ``group`` itself has lost a connection with ``error``."""
    return CollectiveError(f"a collective failed; {failures_on(group).lost_in_words()}: {error}")


def explain_loss(error: BaseException, group: dist.ProcessGroup, board: FailureStore | None = None) -> None:
    """Note on an error of a collective on ``group`` that is not ours which ranks it has to do with.

    ``board`` is where a registration's ranks tell each other of failures, too.

    Does nothing where ``error`` is another, and in the block of a Join, which has its own words.
    """
    if isinstance(error, CollectiveError) or not has_lost_connection(error) or active_join(group) is not None:
        return
    if board is not None and (failure := board.first()) is not None:
        error.add_note(f"another rank of the group failed first: {failure}")
        return
    try:
        error.add_note(failures_on(group).lost_in_words())
    except CollectiveError as silent:
        error.add_note(str(silent))


class FailureStore:
    """Where a rank writes that it failed, for the others to read when a collective does not complete.

    Each set of channels, and each Join, has one of its own, in the store that the process group was made with. A rank
    that has only lost the connection to another one does not report that as a failure, but says that it stops, and how
    many collectives it had finished: so the ranks of which nothing is heard are those that have failed. It says so to
    the whole group, too, since others may wait for it elsewhere: in DDP's own collectives, or for an average.
    """

    finished = 0
    """Collectives that this rank has finished since it came here."""

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._prefix = f"overlap/failures/{key}"
        self._store = BoundedStore(group, self._prefix)
        self._of_group = BoundedStore(group, f"overlap/failures/{_GROUP}")
        self._rank, self._size = group.rank(), group.size()
        self._timeout_s = group_timeout(group, torch.device("cpu")).total_seconds()
        self._group = weakref.ref(group)

    def release(self) -> None:
        """Take note that this rank reads nothing here any more; see [Note: keys left behind]."""
        if (group := self._group()) is not None:
            release(group, self._prefix, self._leave)

    def _leave(self, store: Store) -> None:
        def keys() -> Iterator[str]:
            yield from (f"failure/{place}" for place in range(1, store.add("failures", 0) + 1))
            yield from ("failures", *(f"stopped/{rank}" for rank in range(self._size)))

        leave(store, size=self._size, keys=keys())

    def report(self, error: BaseException) -> None:
        """Tell the group that this rank failed. Never raises: the error itself matters more."""
        with contextlib.suppress(Exception):
            setattr(error, _TOLD, True)
            text = f"rank {self._rank}: {_one_line(error)}"
            self._store.tell(_PATIENCE_S, lambda store: store.set(f"failure/{store.add('failures', 1)}", text))
        self.say_stopped()

    def report_in_block(self, error: BaseException) -> None:
        """As :meth:`report`, of an error of which nobody has looked yet whether another rank has caused it."""
        if isinstance(error, CollectiveError) or has_lost_connection(error):
            self.say_stopped()
        else:
            self.report(error)

    def say_stopped(self) -> None:
        """Tell the group that this rank is there, and does not go on."""
        key, text = f"stopped/{self._rank}", str(self.finished)
        for board in (self._store, self._of_group):
            with contextlib.suppress(Exception):
                board.tell(_PATIENCE_S, lambda store: store.set(key, text))

    def say_back(self) -> None:
        """Tell the group that this rank goes on; called before the ranks meet."""
        if (group := self._group()) is not None:
            leave_released(group)
        with contextlib.suppress(Exception):
            self._of_group.tell(_PATIENCE_S, lambda store: store.delete_key(f"stopped/{self._rank}"))

    def lost_in_words(self) -> str:
        """Which ranks have to do with it that this rank has lost a connection; waits for about a second.

        Those of which nothing is heard: the others have lost a connection, too, unless they are busy and have not
        noticed yet. Where all are there, those that had done less.

        Raises:
            CollectiveError: nothing is known of any rank, since the store does not answer.
        """
        self.say_stopped()
        if (join := self._join()) is not None:
            join.say_stopped()  # Ranks without inputs look there.
        if silent := self.not_stopped(within_s=_SURVEY_S, until_failure=True):
            return f"no word from {_ranks(silent)}, whose process has ended, or hangs"
        others = [rank for rank in range(self._size) if rank != self._rank]
        if not others:
            return "this rank is alone"
        behind = [rank for rank in others if self._finished_by(rank) < self.finished]
        where = f"; {_ranks(behind)} had finished fewer collectives than this rank" if behind else ""
        return (
            f"{_ranks(others)} stopped, too, so a connection is broken, or a rank stood still for longer than the "
            f"timeout{where}"
        )

    def not_stopped(self, *, within_s: float, until_failure: bool = False) -> list[int]:
        """The ranks that go on, as far as is known after so many seconds: they have not said that they stop.

        Raises:
            CollectiveError: nothing is known of any rank, since the store does not answer.
        """
        start_s = time.monotonic()
        going_on = list(range(self._size))
        error: Exception | None = None
        # Others need as long as this rank for a call of the store, before they have said that they stop.
        while going_on and time.monotonic() - start_s < within_s + _CALLS * self._store.took_s:
            try:
                if until_failure and self.look() is not None:
                    break
                going_on = [rank for rank in going_on if self._word_of(rank) is None]
            except SilentStoreError as silent:
                error = silent  # It may only be slow.
            except Exception as failed:
                error = failed
                break
            time.sleep(_ASKING_S)
        if error is not None and len(going_on) == self._size:
            raise CollectiveError(
                f"a connection is lost, and nothing is known of the other ranks: {_host_in_words(error)}"
            ) from error
        return going_on

    def somebody_stopped(self) -> bool:
        """Whether a rank does not go on."""
        with contextlib.suppress(Exception):
            return any(_word(self._store, rank) is not None for rank in range(self._size))
        return False

    def _word_of(self, rank: int) -> str | None:
        """What ``rank`` said when it stopped, here or elsewhere in the group; ``None`` if it has said nothing."""
        here = _word(self._store, rank)
        return _word(self._of_group, rank) if here is None else here

    def _finished_by(self, rank: int) -> int:
        """How many collectives ``rank`` had finished when it stopped; this rank's own number if it has not said."""
        with contextlib.suppress(Exception):
            if (said := _word(self._store, rank)) is not None:
                return int(said)
        return self.finished

    def _join(self) -> ActiveJoin | None:
        group = self._group()
        join = None if group is None else active_join(group)
        return None if join is None or join.is_told_by(self) else join

    def first(self) -> str | None:
        """The first failure that a rank reported here, with the number of the rank."""
        with contextlib.suppress(Exception):
            return self._first()
        return None

    def read(self) -> str | None:
        """As :meth:`first`; where there is none, the first in the group's active Join."""
        with contextlib.suppress(Exception):
            return self.look()
        return None

    def look(self) -> str | None:
        """As :meth:`read`, but it raises where the store cannot be read."""
        if (failure := self._first()) is not None:
            return failure
        join = self._join()
        return None if join is None else join.failure()

    def _first(self) -> str | None:
        return self._store.within(_PATIENCE_S, lambda store: peek(store, "failure/1"))


def _word(board: BoundedStore, rank: int) -> str | None:
    return board.within(_PATIENCE_S, lambda store: peek(store, f"stopped/{rank}"))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _host_in_words(error: BaseException) -> str:
    state = "has ended" if host_has_ended(error) else "hangs or is cut off"
    return f"rank 0 of the job, which hosts the process group's store, {state}"


def _one_line(error: BaseException) -> str:
    notes = " ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error} {notes}".split())
