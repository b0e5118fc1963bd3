"""A group of processes that changes between rounds: coming, going, and gathering for a round. See [Note: views]."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from functools import partial

from overlap._torch.c10d import Store
from overlap._torch.stores import peek
from overlap.errors import CollectiveError, ConfigurationError
from overlap.join.liveness import About, Heartbeat
from overlap.join.views import COMMIT, Agreement, Limits, Pause, View, unanswered

__all__ = ["Membership"]

# A round is given up when it failed so many times more than processes were lost.
_SPARE_ATTEMPTS = 3
# The keys of so many views stay.
_KEPT_VIEWS = 16
_GONE = View(number=-1, after=-1, members=(), newcomers=(), known=0, waiting=())


class Membership:
    """This process's part in a group whose members change; see [Note: views]. No call waits without a deadline.

    Args:
        store: where the group agrees, which must outlive its members.
        prefix: of its keys.
        limits: how many processes, and how long they are waited for.
        signature: what must be the same in all of them.
    """

    def __init__(self, store: Store, prefix: str, limits: Limits, signature: str) -> None:
        self._store, self._prefix, self._limits, self._signature = store, prefix, limits, signature
        self.agreement = Agreement(store, prefix, limits)
        """Decides about views."""
        self.view: View | None = None
        """The last one that was committed with this process in it; ``None`` for a newcomer."""
        self._heartbeat: Heartbeat | None = None
        self._arrived: set[int] = set()
        self._alone_since_s: float | None = None

    @property
    def number(self) -> int:
        """Of this process."""
        return self.agreement.number

    def enter(self, step: int) -> None:
        """Become a newcomer, at ``step``.

        Raises:
            ConfigurationError: the group's signature is another one.
            CollectiveError: the store does not answer.
        """
        agreement = self.agreement
        first = agreement.ask(lambda store: store.compare_set("signature", "", self._signature)).decode()
        if first != self._signature:
            raise ConfigurationError(
                f"the processes of this group must have the same model and settings; here they are {self._signature}, "
                f"and in the group {first}; a new run needs a PrefixStore with a prefix of its own"
            )
        self.view, self._alone_since_s = None, None
        agreement.next, agreement.number = 0, agreement.ask(lambda store: store.add("numbers", 1)) - 1
        about = About.this(step).text()
        agreement.ask(lambda store: store.set(f"process/{self.number}", about))
        try:
            self._heartbeat = Heartbeat(self._store, self._prefix, self.number, self._limits.heartbeat_timeout_s)
        except RuntimeError as error:
            raise unanswered(error) from error

    def leave(self, reason: str = "") -> None:
        """Tell the others that this process is no longer there. Never raises."""
        if self._heartbeat is not None:
            with contextlib.suppress(RuntimeError):
                self.agreement.ask(lambda store: store.set(f"left/{self.number}", reason))
            self._heartbeat.stop()
        self._heartbeat = self.view = None

    # Newcomers ------------------------------------------------------------------------------------------------

    def await_view(self, deadline_s: float) -> View:
        """Wait until this newcomer is in a view.

        Raises:
            CollectiveError: that is not so by ``deadline_s``, or there is no member left.
        """
        pause = Pause()
        while (view := self.agreement.ask(self._invitation)) is None:
            if time.monotonic() > deadline_s:
                raise CollectiveError(self.agreement.ask(self._why_nobody_came))
            pause()
        return view

    def _invitation(self, store: Store) -> View | None:
        invited = peek(store, f"invited/{self.number}")
        if invited is not None and int(invited) >= self.agreement.next:
            return self.agreement.read(store, int(invited))
        if peek(store, "formed") is None:
            return self._form(store)
        self._check_members_live(store)
        return None

    def _form(self, store: Store) -> View | None:
        """A first view, by newcomers alone."""
        agreement = self.agreement
        view = agreement.read(store, agreement.next)
        if view is None:
            known = store.add("numbers", 0)
            newcomers, waiting = self._newcomers(store, range(known))
            if len(newcomers) < self._limits.world_size:
                return None
            # Who is furthest, after loading a checkpoint say, gives its model to the others.
            newcomers.sort(key=lambda one: (-self._step_of(store, one), one))
            proposed = View(
                number=agreement.next, after=-1, members=(), newcomers=tuple(newcomers), known=known, waiting=waiting
            )
            view = agreement.propose(store, proposed)
        decision = agreement.decision(store, view)
        if decision == COMMIT:
            store.set("formed", "")
        elif decision is not None:
            agreement.next = view.number + 1
        return view if decision is None and self.number in view.newcomers else None

    def _step_of(self, store: Store, number: int) -> int:
        about = self.agreement.liveness.about(store, number)
        return 0 if about is None else about.step

    def _check_members_live(self, store: Store) -> None:
        members = json.loads(peek(store, "members") or "[]")
        lost = self.agreement.liveness.lost(store, members)
        if not members or len(lost) < len(members):
            self._alone_since_s = None
            return
        # Others may have come since, of which this process has not read yet.
        now_s = time.monotonic()
        self._alone_since_s = now_s if self._alone_since_s is None else self._alone_since_s
        if now_s - self._alone_since_s > self._limits.heartbeat_timeout_s:
            raise CollectiveError(
                f"no member of this group is left, and the model is lost with them: {'; '.join(lost.values())}; begin "
                "again from a checkpoint, with a PrefixStore whose prefix is new"
            )

    def _why_nobody_came(self, store: Store) -> str:
        waited = f"process {self.number} waited {self._limits.join_timeout_s:g} s (join_timeout)"
        if peek(store, "formed") is not None:
            return f"{waited} for the average at which it would be taken in; the group still trains, or hangs"
        came, _ = self._newcomers(store, range(store.add("numbers", 0)))
        return f"{waited} for world_size={self._limits.world_size} processes, and {len(came)} came"

    def _newcomers(self, store: Store, numbers: Iterable[int]) -> tuple[list[int], tuple[int, ...]]:
        """Those of ``numbers`` that wait to be taken in, and the others that may still do so."""
        numbers, liveness = list(numbers), self.agreement.liveness
        lost = liveness.lost(store, (one for one in numbers if one != self.number))
        here = [one for one in numbers if one not in lost and liveness.about(store, one) is not None]
        return here, tuple(one for one in numbers if one not in here and not liveness.is_gone(one))

    # Members --------------------------------------------------------------------------------------------------

    def gather(self) -> View | None:
        """The view of this member's next round, when all that are alive have come to it or are late; ``None`` if
        the others have gone on without this process.

        Raises:
            CollectiveError: fewer than ``min_size`` are left, or the round has failed too often.
        """
        agreement = self.agreement
        agreement.ask(lambda store: store.set(f"{agreement.next}/arrived/{self.number}", ""))
        self._arrived = {self.number}
        began_s, pause = time.monotonic(), Pause()
        while (view := agreement.ask(partial(self._gathered, time.monotonic() - began_s))) is None:
            pause()
        return view if self.number in view.members else None

    def _gathered(self, waited_s: float, store: Store) -> View | None:
        agreement, last, limits = self.agreement, self.view, self._limits
        assert last is not None, "only members gather"
        view = agreement.read(store, agreement.next)
        if view is not None:
            return view
        if store.add("deleted", 0) > agreement.next:
            return _GONE
        lost = agreement.liveness.lost(store, (one for one in last.everyone if one != self.number))
        living = [one for one in last.everyone if one not in lost]
        missing = [one for one in living if one not in self._arrived]
        self._arrived.update(one for one in missing if store.check([f"{agreement.next}/arrived/{one}"]))
        here = sorted(self._arrived.intersection(living))
        if len(here) < len(living) and waited_s <= limits.timeout_s:
            return None
        failures = agreement.next - last.number - 1
        if failures >= _SPARE_ATTEMPTS + len(last.everyone) - len(here):
            raise CollectiveError(
                f"an average has failed {failures} times, the last time because {agreement.why_failed}; the "
                "parameters are those of this process's last step"
            )
        known = store.add("numbers", 0)
        newcomers, waiting = self._newcomers(store, (*last.waiting, *range(last.known, known)))
        # A newcomer that fails again and again is no reason for the others to do so.
        taken = newcomers if not failures or len(here) < limits.min_size else []
        if len(here) + len(taken) < limits.min_size:
            if waited_s <= limits.join_timeout_s:
                return None
            raise CollectiveError(
                f"{len(here)} processes are left, min_size is {limits.min_size}, and none came in "
                f"{limits.join_timeout_s:g} s (join_timeout): {'; '.join(lost.values())}"
            )
        proposed = agreement.propose(
            store,
            View(
                number=agreement.next, after=last.number, members=tuple(here), newcomers=tuple(taken), known=known,
                waiting=tuple(sorted({*waiting, *newcomers} - {*taken})),
            ),
        )  # fmt: skip
        # The keys of this view may have been there, and be deleted: then the others are far ahead.
        return _GONE if store.add("deleted", 0) > agreement.next else proposed

    def commit(self, view: View) -> None:
        """Say that this process has the result, and wait until all in ``view`` do; then all take it.

        Raises:
            ViewFailed: none does.
        """
        self.agreement.commit(view)
        self.view = view
        # A store that has gone since is an error at the next round. This one is decided.
        with contextlib.suppress(CollectiveError):
            self.agreement.ask(partial(self._settle, view))

    def _settle(self, view: View, store: Store) -> None:
        store.set("members", json.dumps(view.everyone))
        if view.after < 0:
            store.set("formed", "")
        if self.number != view.source:
            return
        # The count first, so that nobody takes a deleted view for one that is still to be proposed.
        while store.add("deleted", 0) <= view.number - _KEPT_VIEWS:
            place = store.add("deleted", 1) - 1
            old = self.agreement.read(store, place) or _GONE
            for key in ("view", "decision", "ready", *(f"arrived/{one}" for one in old.everyone)):
                store.delete_key(f"{place}/{key}")
