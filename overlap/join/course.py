"""How a Join runs: iterations, what is written down in them, and what a rank that has joined does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.failures import FailureStore
from overlap.join.member import Member
from overlap.join.roster import Known, Polled
from overlap.join.script import Entry, Script, Trail

__all__ = ["SKEW_TO_WARN_OF", "Course"]

SKEW_TO_WARN_OF = 1000


class Course:
    """One rank's way through one block: active, then joined, then done.

    ::

        active ranks                              a rank that has joined
        ------------                              ----------------------
        iteration: a batch, or a forward          reads what the writer wrote, in order:
        act: forward, step, ...       -> write -> replay(act)
        backward that synchronizes    -> write -> replay_backward()
        the next iteration (polled)   -> write -> takes part in the all-reduce
        the writer's last (known)     -> write -> leaves
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        script: Script,
        members: Sequence[Member],
        *,
        on_exhausted: str,
        divides_by_count: bool,
        counts_samples: bool,
    ) -> None:
        self.group, self.rank, self.device = group, group.rank(), device
        self.on_exhausted, self.divides_by_count, self.counts_samples = on_exhausted, divides_by_count, counts_samples
        self.iteration = -1
        self.has_thrown = False
        self._script, self._members = script, members
        # Whose acts begin iterations, where no loader is iterated: of those of the highest precedence the first to act.
        self._driver: Member | None = None
        self._roster: Known | Polled | None = None
        self._is_iterating = self._has_ended = self._is_joined = False
        self._trail = Trail(script, lambda: self._is_writer)
        self._joined_at = -1
        self._has_warned = False

    # What the rest of the library asks.

    @property
    def failures(self) -> FailureStore:
        """Where ranks write that they failed."""
        return self._script.failures

    @property
    def divisor(self) -> int:
        """What sums of gradients are divided by in this iteration."""
        return self.count if self.divides_by_count else self.group.size()

    # What members ask and tell.

    @property
    def count(self) -> int:
        """How many ranks have inputs in this iteration."""
        return self.group.size() if self._roster is None else self._roster.count

    @property
    def authority(self) -> int:
        """The rank whose buffers the others take over: of those with inputs the highest."""
        return 0 if self._roster is None else self._roster.authority

    @property
    def weight(self) -> float:
        """What this rank's gradients are multiplied with, for a mean over samples."""
        if not self.counts_samples or self._roster is None or self._is_joined:
            return 1.0
        present = self._roster.present
        return present[self.rank] * self.divisor / sum(present)

    @property
    def hears_backward(self) -> bool:
        """Whether a rank may join after the backward of this iteration."""
        return self.on_exhausted == "shadow" and not self._is_joined and self._someone_may_join

    @property
    def _someone_may_join(self) -> bool:
        if isinstance(self._roster, Known):
            return not self._roster.is_even and self.iteration >= min(self._roster.lengths) - 1
        return True

    def on_act(self, member: Member, detail: Any = None, *, begins_iteration: bool, may_wait: bool = False) -> None:
        """An active rank is about to do something that every active rank does and joined ones replay.

        Args:
            member: who does it.
            detail: how, in plain values; a callable is asked for them once the iteration has begun.
            begins_iteration: whether a new iteration begins with it, where no loader is iterated.
            may_wait: whether joined ranks need not know before the next backward or act.

        Raises:
            TrainingLoopError: this rank said that it would run fewer iterations.
            ConfigurationError: an option needs ``join.iterate``.
        """
        if self._is_joined:
            return
        if self._is_iterating:
            if self._has_ended and self.on_exhausted == "shadow":
                raise TrainingLoopError(
                    f"rank {self.rank} began another forward or step after join.iterate had ended, and ranks that ran "
                    "out before could not follow: leave the block first"
                )
        else:
            self._begin_without_loader(member, begins_iteration=begins_iteration)
        if self.on_exhausted == "shadow":
            self._put("act", member.index, detail() if callable(detail) else detail, may_wait=may_wait)

    def on_backward(self, member: Member) -> None:
        """An active rank is about to reduce gradients."""
        if not self._is_joined:
            self._trail.put_after(Entry(self.iteration, "backward", member.index))

    # How iterations begin.

    def know(self, lengths: Sequence[int]) -> None:
        """How many iterations every rank will run."""
        self._roster = Known(lengths)

    def begin_iterating(self, length: int | None) -> Known | Polled:
        """A loader is iterated; ``length`` is its number of batches, where it knows."""
        if self._is_iterating or self._trail.acts or self.iteration >= 0:
            raise TrainingLoopError(
                "join.iterate comes once in a block and before its first forward or step: one Join is one pass over "
                "the data, so open another for the next epoch"
            )
        self._is_iterating = True
        if self._roster is None:
            lengths = self._script.exchange("join.iterate", None if self.counts_samples else length)
            if None in lengths:
                self._roster = Polled(self.group, self.device, ahead=True)
            else:
                self._roster = Known(lengths)
        return self._roster

    def begin_known(self) -> None:
        """The next iteration begins, of a known number."""
        roster = self._roster
        assert isinstance(roster, Known)
        self.iteration += 1
        if self.iteration >= roster.lengths[self.rank]:
            raise TrainingLoopError(
                f"rank {self.rank} said that it would run {roster.lengths[self.rank]} iterations, but begins another; "
                "an iteration is a forward that records gradients, or a batch of join.iterate(loader)"
            )
        roster.iteration = self.iteration
        self.throw_if_exhausted()

    def begin_polled(self) -> None:
        """The next iteration begins, if any rank has inputs: ``missing`` says who has none."""
        roster = self._roster
        assert isinstance(roster, Polled)
        self._put("meet")
        roster.begin()
        self.throw_if_exhausted()

    def tell(self, samples: int) -> None:
        """Tell of the iteration after this one."""
        roster = self._roster
        assert isinstance(roster, Polled)
        roster.tell(samples)
        self.iteration += 1

    def end_iterating(self) -> None:
        """The loader has no more batches, or ranks stopped together."""
        self._has_ended = True

    def _begin_without_loader(self, member: Member, *, begins_iteration: bool) -> None:
        if self.on_exhausted == "stop" or self.counts_samples:
            option = 'on_exhausted="stop"' if self.on_exhausted == "stop" else "weight_by_samples"
            raise ConfigurationError(f"{option} needs `for batch in join.iterate(loader)` around the forward")
        if self._driver is None and member.precedence == max(each.precedence for each in self._members):
            self._driver = member
        if member is not self._driver:
            return
        if isinstance(self._roster, Known):
            if begins_iteration:
                self.begin_known()
            return
        self._meet_without_loader(has_inputs=True)
        self.iteration += 1

    def _meet_without_loader(self, *, has_inputs: bool) -> None:
        if self._roster is None:
            self._roster = Polled(self.group, self.device, ahead=False)
        assert isinstance(self._roster, Polled)
        place = self._trail.acts + 1
        self._put("meet")
        self._roster.tell(place if has_inputs else -place)
        self.throw_if_exhausted()

    def throw_if_exhausted(self) -> None:
        """Raises: TrainingLoopError: some ranks have inputs and some have none, and that is to be an error."""
        roster = self._roster
        if self.on_exhausted != "raise" or roster is None:
            return
        if roster.missing and roster.count:
            self.has_thrown = True
            raise TrainingLoopError(
                f"ranks {roster.missing} exhausted all inputs after {max(self.iteration, 0)} iterations or more and "
                "others did not; throwing across all ranks"
            )

    # What is written down.

    def _put(self, kind: str, member: int = -1, detail: Any = None, *, may_wait: bool = False) -> None:
        self._trail.put(Entry(self.iteration, kind, member, detail), may_wait=may_wait)

    @property
    def _is_writer(self) -> bool:
        roster = self._roster
        if roster is None or self.on_exhausted != "shadow":
            return False
        if isinstance(roster, Known):
            return self._someone_may_join and roster.writer == self.rank
        return bool(roster.missing) and roster.authority == self.rank

    # How a rank's own part ends.

    def finish(self) -> bool:
        """Do what the others do until all have run out; whether this rank was among the last."""
        self._trail.flush()
        self._joined_at = self.iteration
        if self.on_exhausted == "stop":
            self._check_same_iterations()
            return True
        self._check_ran_as_said()
        is_last_joiner = self._join_known() if isinstance(self._roster, Known) else self._join_polled()
        self._script.exchange("the end of Join", None)
        return is_last_joiner

    def _check_same_iterations(self) -> None:
        ran = [iteration + 1 for iteration in self._script.exchange("the end of Join", self.iteration)]
        if len(set(ran)) > 1:
            fewest = [rank for rank, number in enumerate(ran) if number == min(ran)]
            raise TrainingLoopError(
                f"ranks {fewest} left the loop after {min(ran)} iterations, others after {max(ran)}"
            )

    def _check_ran_as_said(self) -> None:
        ran = self.iteration + 1
        if isinstance(self._roster, Known):
            if ran < (said := self._roster.lengths[self.rank]):
                raise TrainingLoopError(
                    f"rank {self.rank} said that it would run {said} iterations, but left the block after {ran}; to "
                    'leave early use on_exhausted="stop", and leave on every rank in the same iteration'
                )
        elif self._is_iterating and not self._has_ended:
            raise TrainingLoopError(
                f"rank {self.rank} left join.iterate(loader) after {ran} batches while it had more; to leave early use "
                'on_exhausted="stop", and leave on every rank in the same iteration'
            )

    def _join_known(self) -> bool:
        roster = self._roster
        assert isinstance(roster, Known)
        is_last = roster.lengths[self.rank] == max(roster.lengths)
        self._is_joined = True
        if self.on_exhausted == "raise":
            if not roster.is_even:
                roster.iteration = min(roster.lengths)
                self.throw_if_exhausted()
        elif is_last:
            self._put("end")
        else:
            self._replay_until("end")
        roster.iteration = max(roster.lengths) - 1
        return is_last

    def _join_polled(self) -> bool:
        if not self._is_iterating:
            self._meet_without_loader(has_inputs=False)
        roster = self._roster
        assert isinstance(roster, Polled)
        is_last = not roster.count
        self._is_joined = True
        while roster.count:
            if self._is_iterating:
                roster.tell(0)
            self.iteration += 1
            self._replay_until("meet")
            if self._is_iterating:
                roster.begin()
            else:
                roster.tell(0)
        return is_last

    def _replay_until(self, last: str) -> None:
        """Do what is written down, up to and with an entry of kind ``last``."""
        while True:
            entry = self._trail.read("backward")
            self._follow_to(entry.iteration)
            if entry.kind == "backward":
                self._members[entry.member].replay_backward()
            elif entry.kind == last:
                return
            else:
                self._members[entry.member].replay(entry.detail)

    def _follow_to(self, iteration: int) -> None:
        self.iteration = iteration
        if isinstance(self._roster, Known):
            self._roster.iteration = iteration
        if iteration - self._joined_at > SKEW_TO_WARN_OF and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"uneven inputs: rank {self.rank} ran out after {self._joined_at + 1} iterations and has replayed "
                f"{SKEW_TO_WARN_OF} of other ranks since; share inputs out more evenly, or training is slow",
                stacklevel=2,
            )
