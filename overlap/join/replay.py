"""What a rank that has run out of inputs does until every rank has."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from overlap.join.event_log import EventKind
from overlap.join.hyperparameters import Hyperparameters
from overlap.join.iterations import Iterations
from overlap.join.participation import KnownParticipation, PolledParticipation
from overlap.join.session import JoinableAdapter

__all__ = ["SKEW_TO_WARN_OF", "Replay"]

SKEW_TO_WARN_OF = 1000


class Replay:
    """Reads the event log from this rank's position on, and does what the events say."""

    def __init__(
        self, iterations: Iterations, adapters: Sequence[JoinableAdapter], hyperparameters: Hyperparameters
    ) -> None:
        self._iterations, self._adapters, self._hyperparameters = iterations, adapters, hyperparameters
        self._joined_at = iterations.current
        self._has_warned = False

    def run(self) -> bool:
        """Replay until all ranks have run out; whether this rank was among the last.

        Raises:
            TrainingLoopError: some ranks have run out before others, and ``on_exhausted="raise"``.
                Or a scheduler that is not given to the Join has stepped.
            PeerError: another rank failed.
            CollectiveError: nothing was written within the group's timeout.
        """
        participation = self._iterations.participation
        if isinstance(participation, KnownParticipation):
            return self._run_known(participation)
        return self._run_polled(participation)

    def _run_known(self, participation: KnownParticipation) -> bool:
        iterations = self._iterations
        is_last = participation.lengths[iterations.rank] == max(participation.lengths)
        if iterations.options.on_exhausted == "raise":
            if not participation.is_even:
                participation.iteration = min(participation.lengths)
                iterations.raise_if_exhausted()
        elif is_last:
            iterations.append(EventKind.END)
        else:
            self._replay_until(EventKind.END)
        participation.iteration = max(participation.lengths) - 1
        return is_last

    def _run_polled(self, participation: PolledParticipation | None) -> bool:
        if participation is None or not participation.is_ahead:
            participation = self._iterations.poll(has_inputs=False)
        is_last = not participation.count
        while participation.count:
            if participation.is_ahead:
                participation.announce(0)
            self._iterations.current += 1
            self._replay_until(EventKind.POLL)
            if participation.is_ahead:
                participation.settle()
            else:
                participation.announce(0)
        return is_last

    def _replay_until(self, last: EventKind) -> None:
        """Replay events up to the next of kind ``last``, which is read, too."""
        while True:
            event = self._iterations.cursor.read()
            self._iterations.move_to(event.iteration)
            self._warn_of_skew()
            if event.kind is last:
                return
            adapter = self._adapters[event.joinable]
            if event.kind is EventKind.BACKWARD or adapter.is_optimizer:
                self._hyperparameters.follow(event.detail)
            if event.kind is EventKind.BACKWARD:
                adapter.replay_backward()
            else:
                adapter.replay(event.detail)

    def _warn_of_skew(self) -> None:
        if self._has_warned or self._iterations.current - self._joined_at <= SKEW_TO_WARN_OF:
            return
        self._has_warned = True
        warnings.warn(
            f"uneven inputs: rank {self._iterations.rank} ran out after {self._joined_at + 1} iterations and has "
            f"replayed {SKEW_TO_WARN_OF} of other ranks since; distribute inputs more evenly: this slows training",
            stacklevel=2,
        )
