"""Who makes a round together, and whether they take its result: agreed in a store.

[Note: views]

A round is tried in *views*, numbered from 0 on. A view names the members, which make the round, and the newcomers,
which are given its result. Two keys of the store decide about it, and each is written once, by ``compare_set``, whoever
is first:

- its text: the first process that finds that all who are alive have arrived, or that the others are late, proposes, and
  all take what they read there;
- its decision: ``commit``, by the last of its processes to say that it has the result, or ``retry``, by any of them
  that cannot go on, or finds another one lost. Nobody changes anything before it has read ``commit``, so all in a view
  take its result, or none does, and those that are left try again in the next view.

While no view is committed there is no group: newcomers propose, when there are enough of them. A process that is not in
the view of its round has been given up by the others, and may only come back as a newcomer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from overlap._torch.c10d import Store
from overlap._torch.stores import BoundedStore, SilentStoreError, host_has_ended, peek
from overlap.errors import CollectiveError
from overlap.join.liveness import Liveness

__all__ = ["COMMIT", "Agreement", "Limits", "Pause", "View", "ViewFailed", "unanswered"]

T = TypeVar("T")

COMMIT = "commit"
_RETRY = "retry: "
_PAUSES_S = (0.0005, 0.02)


class ViewFailed(Exception):
    """A view was decided against; says why."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many processes, and how long they are waited for, in seconds."""

    world_size: int
    min_size: int
    timeout_s: float
    join_timeout_s: float
    heartbeat_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class View:
    """Who tries a round together; see [Note: views]. Processes are known by numbers that are never used again."""

    number: int
    after: int
    """The last view before it that was committed; -1 where there was none."""

    members: tuple[int, ...]
    newcomers: tuple[int, ...]
    known: int
    """How many numbers processes had taken when it was proposed."""

    waiting: tuple[int, ...]
    """Those of them that may still come in."""

    @property
    def everyone(self) -> tuple[int, ...]:
        """Members and newcomers."""
        return (*self.members, *self.newcomers)

    @property
    def source(self) -> int:
        """Who gives newcomers what they need."""
        return self.everyone[0]

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who is given it."""
        return tuple(one for one in self.newcomers if one != self.source)

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> View:
        """The view that :meth:`text` describes."""
        fields: Any = json.loads(text)
        for name in ("members", "newcomers", "waiting"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


class Agreement:
    """Proposes views and decides about them. No call waits without a deadline.

    Args:
        store: where the group agrees.
        prefix: of its keys.
        limits: how long others are waited for.
    """

    def __init__(self, store: Store, prefix: str, limits: Limits) -> None:
        self._store = BoundedStore(store, prefix)
        self._limits = limits
        self.liveness = Liveness(limits.heartbeat_timeout_s)
        self.number = -1
        """Of this process."""
        self.next = 0
        """The view that comes next, as far as this process knows."""
        self.why_failed = ""
        """Why the last view that failed did."""

    def ask(self, call: Callable[[Store], T]) -> T:
        """``call(store)``.

        Raises:
            CollectiveError: the store does not answer, or ``call`` raises one.
        """
        try:
            return self._store.within(self._limits.heartbeat_timeout_s, call)
        except RuntimeError as error:
            if isinstance(error, CollectiveError) and not isinstance(error, SilentStoreError):
                raise
            raise unanswered(error) from error

    # Called with the store, inside of ask().

    def read(self, store: Store, number: int) -> View | None:
        """The view of this number, if one is proposed."""
        text = peek(store, f"{number}/view")
        return None if text is None else View.of(text)

    def propose(self, store: Store, view: View) -> View:
        """The view of this number: ``view``, if nobody has proposed another one."""
        text = _written(f"{view.number}/view", view.text(), store)
        if text == view.text():
            for newcomer in view.newcomers:
                store.set(f"invited/{newcomer}", str(view.number))
        return View.of(text)

    def decision(self, store: Store, view: View) -> str | None:
        """What was decided about ``view``; that it failed, if a process that must have the result is lost."""
        decision = peek(store, f"{view.number}/decision")
        lost = {} if decision is not None else self.liveness.lost(store, (o for o in view.everyone if o != self.number))
        # Those that are in it decide by themselves, as long as one is left.
        if not lost or (self.number not in view.everyone and len(lost) < len(view.everyone)):
            return decision
        return _written(f"{view.number}/decision", _RETRY + "; ".join(lost.values()), store)

    # Called by those that are in the view.

    def look(self, view: View) -> None:
        """Look whether all in ``view`` are still there.

        Raises:
            ViewFailed: one is lost, or a process has given the view up.
        """
        decision = self.ask(lambda store: self.decision(store, view))
        if decision is not None:
            raise self._failed(view, decision)

    def until(self, view: View, is_done: Callable[[], bool]) -> None:
        """Wait for what the processes of ``view`` do together, and :meth:`look` meanwhile.

        Raises:
            ViewFailed: as there, or it takes longer than the timeout.
        """
        deadline_s, pause = time.monotonic() + self._limits.timeout_s, Pause()
        while not is_done():
            self.look(view)
            if time.monotonic() > deadline_s:
                self.reject(view, f"it took longer than {self._limits.timeout_s:g} s (timeout)")
            pause()

    def reject(self, view: View, reason: str) -> NoReturn:
        """Give ``view`` up: nobody takes its result. Not after :meth:`commit`.

        Raises:
            ViewFailed: always.
        """
        decision = self.ask(partial(_written, f"{view.number}/decision", _RETRY + reason))
        assert decision != COMMIT, "this process has not said that it has the result"
        raise self._failed(view, decision)

    def commit(self, view: View) -> None:
        """Say that this process has the result, and wait until all in ``view`` do; then all take it.

        Raises:
            ViewFailed: none does.
        """
        self.ask(partial(_vote, view))
        deadline_s, pause = time.monotonic() + self._limits.timeout_s, Pause()
        while (decision := self.ask(lambda store: self.decision(store, view))) is None:
            if time.monotonic() > deadline_s:
                said = f"{_RETRY}not all had the result in {self._limits.timeout_s:g} s (timeout)"
                decision = self.ask(partial(_written, f"{view.number}/decision", said))
                break
            pause()
        if decision != COMMIT:
            raise self._failed(view, decision)
        self.next = view.number + 1

    def _failed(self, view: View, decision: str) -> ViewFailed:
        self.next = view.number + 1
        self.why_failed = decision.removeprefix(_RETRY)
        return ViewFailed(self.why_failed)


class Pause:
    """Short at first, then longer."""

    def __init__(self) -> None:
        self._next_s, self._longest_s = _PAUSES_S

    def __call__(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


def unanswered(error: RuntimeError) -> CollectiveError:
    """What to raise where a call of the store raised ``error``."""
    state = "has ended" if host_has_ended(error) else "hangs or is cut off"
    return CollectiveError(
        f"the process that hosts the store of this group {state}, and without it nobody can agree: let a process host "
        "it that does not train, and outlives those that do; the parameters are those of the last step"
    )


def _vote(view: View, store: Store) -> None:
    if store.add(f"{view.number}/ready", 1) == len(view.everyone):
        store.compare_set(f"{view.number}/decision", "", COMMIT)


def _written(key: str, value: str, store: Store) -> str:
    """``value``, if ``key`` had none, else what it has."""
    return store.compare_set(key, "", value).decode()
