"""One rank in the block of a Join: answers adapters, and writes their events to the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.adapters import JoinableAdapter
from overlap.join.event_log import EventKind, EventLog
from overlap.join.failures import FailureStore
from overlap.join.iterations import Iterations, Phase
from overlap.join.options import JoinOptions
from overlap.join.participation import KnownParticipation
from overlap.join.replay import Replay

__all__ = ["JoinSession"]


class JoinSession:
    """One rank in one block: it is active, then it replays what other ranks do, until all have run out.

    ::

        active ranks                              a rank that has joined
        ------------                              ----------------------
        iteration: a batch, or a forward          reads what the writer wrote, in order:
        event: forward, step, ...     -> write -> adapter.replay(detail)
        backward that synchronizes    -> write -> adapter.replay_backward()
        the next iteration (polled)   -> write -> takes part in the all-reduce
        the writer's last (known)     -> write -> leaves
    """

    def __init__(self, log: EventLog, iterations: Iterations, adapters: Sequence[JoinableAdapter]) -> None:
        self.iterations = iterations
        self._log, self._adapters = log, adapters
        # The adapter that begins iterations, where no loader is iterated.
        self._driver: JoinableAdapter | None = None

    # What the rest of the library asks.

    @property
    def failures(self) -> FailureStore:
        """Where ranks write that they failed."""
        return self._log.failures

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided in this iteration."""
        return self.count if self.options.divides_by_count else self.iterations.group.size()

    # What adapters ask and tell.

    @property
    def options(self) -> JoinOptions:
        """What the Join was told."""
        return self.iterations.options

    @property
    def count(self) -> int:
        """How many ranks have inputs in this iteration."""
        return self.iterations.count

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over: the highest of those that have inputs."""
        participation = self.iterations.participation
        return 0 if participation is None else participation.buffer_source

    @property
    def gradient_weight(self) -> float:
        """What this rank's gradients are multiplied by, for a mean over samples."""
        participation = self.iterations.participation
        if not self.options.counts_samples or participation is None or self._has_joined:
            return 1.0
        samples = participation.samples
        return samples[self.iterations.rank] * self.divisor / sum(samples)

    @property
    def needs_backward_events(self) -> bool:
        """Whether a rank may join after the backward of this iteration."""
        return self.options.on_exhausted == "shadow" and not self._has_joined and self.iterations.may_someone_join

    def on_event(
        self, adapter: JoinableAdapter, detail: Any = None, *, begins_iteration: bool, delay_write: bool = False
    ) -> None:
        """See :class:`overlap.join.adapters.Session`."""
        if self._has_joined:
            return
        shadows = self.options.on_exhausted == "shadow"
        if self.iterations.phase is Phase.LOOPING:
            self._begin_without_loader(adapter, begins_iteration=begins_iteration)
        elif self.iterations.phase is Phase.EXHAUSTED and shadows:
            raise TrainingLoopError(
                f"rank {self.iterations.rank} began another forward or step after join.iterate had ended, and ranks "
                "that ran out before could not follow: leave the block first"
            )
        if shadows:
            detail = detail() if callable(detail) else detail
            self.iterations.append(EventKind.CALL, adapter.index, detail, delay_write=delay_write)

    def on_backward(self, adapter: JoinableAdapter) -> None:
        """See :class:`overlap.join.adapters.Session`."""
        if not self._has_joined:
            self.iterations.append(EventKind.BACKWARD, adapter.index)

    def finish(self) -> bool:
        """Replay what the others do until all have run out; whether this rank was among the last.

        Raises:
            TrainingLoopError: this rank ran another number of iterations than it said, or than the others.
        """
        self.iterations.join()
        if self.options.on_exhausted == "stop":
            return True
        is_last_joiner = Replay(self.iterations, self._adapters).run()
        self._log.exchange("the end of Join", None)
        return is_last_joiner

    @property
    def _has_joined(self) -> bool:
        return self.iterations.phase is Phase.JOINED

    def _begin_without_loader(self, adapter: JoinableAdapter, *, begins_iteration: bool) -> None:
        if self.options.on_exhausted == "stop" or self.options.counts_samples:
            option = 'on_exhausted="stop"' if self.options.on_exhausted == "stop" else "weight_by_samples"
            raise ConfigurationError(f"{option} needs `for batch in join.iterate(loader)` around the forward")
        if self._driver is None and adapter.precedence == max(each.precedence for each in self._adapters):
            self._driver = adapter
        if adapter is not self._driver:
            return
        if not isinstance(self.iterations.participation, KnownParticipation):
            self.iterations.begin_by_forward()
        elif begins_iteration:
            self.iterations.begin_known()
