"""One rank in the block of a Join: answers adapters, and writes their events to the log."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import refuse_capture
from overlap._torch.read_only import AppliedGradient, Attempt, Terms
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.board import Board
from overlap.join.event_log import EventKind
from overlap.join.hyperparameters import Hyperparameters
from overlap.join.iterations import Iterations, Phase
from overlap.join.participation import KnownParticipation

__all__ = ["JoinSession", "JoinableAdapter"]


class JoinableAdapter(ABC):
    """A joinable under one Join: watches what its rank does, and replays it on a rank that has joined."""

    index: int = -1
    is_optimizer: bool = False
    """Whether what it replays are steps of an optimizer."""
    precedence: int = 0
    """Where no loader is iterated, iterations begin with the first adapter of the highest precedence."""

    @abstractmethod
    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        """Begin to watch: the block begins. ``undo`` is closed when it is over, with or without an exception."""

    @abstractmethod
    def replay(self, detail: Any) -> None:
        """Do what ``detail`` says, on a rank that has joined."""

    def replay_backward(self) -> None:
        """Reduce gradients of zero, on a rank that has joined."""
        raise AssertionError(f"{self!r} has no backward")

    def post(self, *, is_last_joiner: bool) -> None:  # noqa: B027
        """Called when all ranks have joined."""


class ReplayedGradients(Terms):
    """Gradients of a backward that ranks without inputs replay: read-only until ``step()``, since those ranks step with
    the mean that backward left. See [Note: applied gradients are read-only]."""

    def __init__(self, session: JoinSession) -> None:
        self._session = session
        self._handed: dict[int, tuple[Tensor, AppliedGradient]] = {}

    def hand_over(self, parameters: Iterable[Tensor]) -> None:
        """A backward is over that ranks without inputs have replayed."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not isinstance(gradient, AppliedGradient):
                handed = AppliedGradient(gradient, gradient, weakref.ref(parameter), self)
                self._handed[id(parameter)] = parameter, handed
                parameter.grad = handed

    def take_back(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Put ordinary tensors back into ``.grad`` of ``parameters``; by default of all.

        Raises:
            TrainingLoopError: the loop has put another gradient there.
        """
        keys = (
            list(self._handed) if parameters is None else [id(each) for each in parameters if id(each) in self._handed]
        )
        for parameter, handed in [self._handed.pop(key) for key in keys]:
            if parameter.grad is handed:
                parameter.grad = handed.plain
            elif parameters is not None:
                self.refuse(handed, Attempt.WRITE)

    def refuse(self, gradient: AppliedGradient, attempt: Attempt) -> NoReturn:
        raise TrainingLoopError(
            "gradients cannot be changed between backward and step() (by clipping or GradScaler, say) while ranks "
            f"{self._session.missing} have run out of inputs and step with the mean that backward left: clip with "
            "Step(optimizer, clip_grad_norm=...), ZeroStep(zero, clip_grad_norm=...) or "
            "LocalSGD(..., transforms=[ClipGradNorm(...)]), and leave GradScaler out (bfloat16 needs none)"
        )


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

    def __init__(
        self, iterations: Iterations, adapters: Sequence[JoinableAdapter], hyperparameters: Hyperparameters
    ) -> None:
        self.iterations, self.options = iterations, iterations.options
        self.hyperparameters = hyperparameters
        self.gradients = ReplayedGradients(self)
        self.replays_own_gradients = False
        self._adapters = adapters
        # The adapter that begins iterations, where no loader is iterated.
        self._driver: JoinableAdapter | None = None

    @property
    def board(self) -> Board:
        """Where the ranks in the block report failures."""
        return self.iterations.log.board

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided in this iteration."""
        return self.iterations.count if self.options.divides_by_count else self.iterations.group.size()

    def divisor_among(self, ranks: Sequence[int]) -> int:
        """The same, for sums over ``ranks`` only."""
        if not self.options.divides_by_count or (participation := self.iterations.participation) is None:
            return len(ranks)
        samples = participation.samples
        return max(1, sum(1 for rank in ranks if samples[rank]))  # Where none has inputs, the sum is of zeros.

    @property
    def missing(self) -> list[int]:
        """The ranks that have run out of inputs in this iteration, as far as it is known."""
        participation = self.iterations.participation
        return [] if participation is None or self.options.on_exhausted != "shadow" else participation.missing

    @property
    def weights_gradients(self) -> bool:
        """Whether gradients are weighted by samples."""
        return self.options.counts_samples

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over: the highest of those that have inputs."""
        if self.options.on_exhausted == "stop":
            return self.iterations.group.size() - 1  # All ranks have inputs in every iteration that is run.
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
        """Whether ``on_backward`` must be called: a rank may join after the backward of this iteration."""
        return self.options.on_exhausted == "shadow" and not self._has_joined and self.iterations.may_someone_join

    def on_event(
        self, adapter: JoinableAdapter, detail: Any = None, *, begins_iteration: bool, delay_write: bool = False
    ) -> None:
        """Called before an active rank does what every active rank does, and joined ranks replay.

        Args:
            adapter: of the joinable that does it.
            detail: given to ``adapter.replay``, in values that JSON can hold; a callable is called for them once the
                iteration has begun.
            begins_iteration: whether a new iteration begins with it, where no loader is iterated.
            delay_write: whether joined ranks need not know of it before the next event.

        Raises:
            TrainingLoopError: this rank said that it would run fewer iterations.
            ConfigurationError: an option needs ``join.iterate``.
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture("an iteration under Join", "leave the block first")
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

    def on_step(self, adapter: JoinableAdapter, optimizer: Optimizer, *, begins_iteration: bool) -> None:
        """Called before ``optimizer`` steps on an active rank: as :meth:`on_event`.

        Raises:
            TrainingLoopError: gradients were edited since backward, which ranks without inputs do not do.
        """
        if not self._has_joined:
            # A step of this rank alone is not replayed: its gradients go back as they are.
            is_alone = getattr(optimizer, "steps_alone", False)
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            self.gradients.take_back(None if is_alone else parameters)
        self.on_event(adapter, self._told, begins_iteration=begins_iteration)

    def on_backward(self, adapter: JoinableAdapter) -> None:
        """Called before an active rank reduces gradients."""
        if not self._has_joined:
            self.iterations.append(EventKind.BACKWARD, adapter.index, self._told())

    def _told(self) -> Any:
        return self.hyperparameters.told() if self.iterations.is_writer else None

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
        if not isinstance(participation := self.iterations.participation, KnownParticipation):
            self.iterations.poll(has_inputs=True)
            self.iterations.current += 1
        elif begins_iteration:
            self.iterations.begin_known(participation)
