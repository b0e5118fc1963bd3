"""How iterations begin, and which ranks have inputs in them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist

from overlap.errors import TrainingLoopError
from overlap.join.event_log import Cursor, Event, EventKind, EventLog
from overlap.join.options import JoinOptions
from overlap.join.participation import KnownParticipation, PolledParticipation

__all__ = ["Iterations", "Phase"]


class Phase(Enum):
    """What a rank does in the block, in this order. Without ``join.iterate`` it goes from the first to the last."""

    LOOPING = auto()
    """Active: forwards begin iterations, since no loader is iterated."""

    ITERATING = auto()
    """Active: the batches of ``join.iterate`` begin iterations."""

    EXHAUSTED = auto()
    """``join.iterate`` has ended, and the rank is still in the block's body."""

    JOINED = auto()
    """Replays what others do, until all have run out."""


class Iterations:
    """Counts one rank's iterations, and moves the rank from phase to phase.

    ``lengths`` are the iterations that each rank will run, where the Join was given them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        log: EventLog,
        options: JoinOptions,
        *,
        lengths: Sequence[int] | None,
    ) -> None:
        self.group, self.rank, self.options = group, group.rank(), options
        self.current = -1
        self.phase = Phase.LOOPING
        self.participation: KnownParticipation | PolledParticipation | None = None
        if lengths is not None:
            self.participation = KnownParticipation(lengths)
        self.cursor = Cursor(log, lambda: self.is_writer)
        self.has_raised_on_all = False
        """Whether ``on_exhausted="raise"`` raised, on every rank."""
        self.log = log
        self._device = device

    @property
    def count(self) -> int:
        """How many ranks have inputs in this iteration."""
        return self.group.size() if self.participation is None else self.participation.count

    @property
    def may_someone_join(self) -> bool:
        """Whether a rank may have run out when this iteration is over."""
        participation = self.participation
        if isinstance(participation, KnownParticipation):
            return not participation.is_even and self.current >= min(participation.lengths) - 1
        return True

    def append(self, kind: EventKind, joinable: int = -1, detail: object = None, *, delay_write: bool = False) -> None:
        """Append an event of this iteration to the log."""
        self.cursor.append(Event(self.current, kind, joinable, detail), delay_write=delay_write)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the events of this iteration, for those that have run out of inputs."""
        participation = self.participation
        if participation is None or self.options.on_exhausted != "shadow":
            return False
        if isinstance(participation, KnownParticipation):
            return self.may_someone_join and participation.writer == self.rank
        return bool(participation.missing) and participation.buffer_source == self.rank

    # With a loader.

    def begin_loader(self, length: int | None) -> KnownParticipation | PolledParticipation:
        """``join.iterate`` begins; ``length`` is the loader's number of batches, where it is known.

        Waits for the lengths of all ranks, where the Join was given none.

        Raises:
            TrainingLoopError: not the first thing in the block.
        """
        if self.phase is not Phase.LOOPING or self.cursor.count or self.current >= 0:
            raise TrainingLoopError(
                "join.iterate comes once in a block and before its first forward or step: one Join is one pass over "
                "the data, so open another for the next epoch"
            )
        self.phase = Phase.ITERATING
        if self.participation is None:
            lengths = self.log.exchange("join.iterate", None if self.options.counts_samples else length)
            if None in lengths:
                self.participation = PolledParticipation(self.group, self._device, ahead=True, look=self.log.board.poll)
            else:
                self.participation = KnownParticipation(lengths)
        return self.participation

    # How an iteration begins.

    def begin_known(self, participation: KnownParticipation) -> None:
        """Begin the next iteration, of a known number.

        Raises:
            TrainingLoopError: this rank said that it would run fewer, or ``on_exhausted="raise"``.
        """
        self.move_to(self.current + 1)
        if self.current >= participation.lengths[self.rank]:
            raise TrainingLoopError(
                f"rank {self.rank} said that it would run {participation.lengths[self.rank]} iterations, but begins "
                "another; an iteration is a forward that records gradients, or a batch of join.iterate(loader)"
            )
        self.raise_if_exhausted()

    def begin_announced(self, participation: PolledParticipation) -> None:
        """Wait for what was announced of the next iteration: ``participation.missing`` then says who has no inputs."""
        self.append(EventKind.POLL)
        participation.settle()
        self.raise_if_exhausted()

    def poll(self, *, has_inputs: bool) -> PolledParticipation:
        """Issue the all-reduce that says who has inputs in this iteration, where no loader is iterated."""
        participation = self.participation
        if participation is None:
            self.participation = participation = PolledParticipation(
                self.group, self._device, ahead=False, look=self.log.board.poll
            )
        assert isinstance(participation, PolledParticipation)
        self.append(EventKind.POLL)
        participation.announce(self.cursor.count if has_inputs else -self.cursor.count)
        self.raise_if_exhausted()
        return participation

    def move_to(self, iteration: int) -> None:
        """Make ``iteration`` the current one."""
        self.current = iteration
        if isinstance(self.participation, KnownParticipation):
            self.participation.iteration = iteration

    def raise_if_exhausted(self) -> None:
        """Raises: TrainingLoopError: some ranks have inputs, some have none, and ``on_exhausted="raise"``."""
        participation = self.participation
        if self.options.on_exhausted != "raise" or participation is None:
            return
        if participation.missing and participation.count:
            self.has_raised_on_all = True
            # The first sentences are PyTorch's, which people match on.
            happened = (
                f"Rank {self.rank} exhausted all inputs."
                if self.rank in participation.missing
                else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )
            raise TrainingLoopError(
                f"{happened} Ranks {participation.missing} ran out after {max(self.current, 0)} iterations or more and "
                'others did not, which on_exhausted="raise" makes an error on all'
            )

    # How this rank's own iterations end.

    def join(self) -> None:
        """This rank has left its loop.

        Raises:
            TrainingLoopError: it ran another number of iterations than it said, or than the others.
        """
        self.cursor.flush()
        if self.options.on_exhausted == "stop":
            self._check_same_iterations()
        else:
            self._check_ran_as_said()
        self.phase = Phase.JOINED

    def _check_same_iterations(self) -> None:
        ran = [iteration + 1 for iteration in self.log.exchange_at_end(self.current)]
        if len(set(ran)) > 1:
            fewest = [rank for rank, number in enumerate(ran) if number == min(ran)]
            raise TrainingLoopError(
                f"ranks {fewest} left the loop after {min(ran)} iterations, others after {max(ran)}"
            )

    def _check_ran_as_said(self) -> None:
        ran = self.current + 1
        if isinstance(self.participation, KnownParticipation):
            if ran < (said := self.participation.lengths[self.rank]):
                raise TrainingLoopError(
                    f"rank {self.rank} said that it would run {said} iterations, but left the block after {ran}; to "
                    'leave early use on_exhausted="stop", and leave on every rank in the same iteration'
                )
        elif self.phase is Phase.ITERATING:
            raise TrainingLoopError(
                f"rank {self.rank} left join.iterate(loader) after {ran} batches while it had more; to leave early use "
                'on_exhausted="stop", and leave on every rank in the same iteration'
            )
