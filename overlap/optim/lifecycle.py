"""The lifecycle of an update: what a training loop may do when, and what happens to the gradients.

[Note: the update lifecycle]

An update that is not made in ``optimizer.step()`` must be exactly plain DDP's, or an error. Which one depends on where
the loop is: whether gradients are there, whether they are the mean over ranks, whether they have been applied. That is
one value, the :class:`Phase`, and :data:`TRANSITIONS` says which phase each event leads to, and which events are
refused. A comment in the table marks the entries that depend on the gradients, too; :class:`UpdateLifecycle` refuses
those. The update of replicated parameters (``Step``), the sharded one (``ZeroStep``) and local SGD use it alike; no
other object keeps a flag about it. ``docs/lifecycle.md`` shows the table as a picture.

What happens to ``.grad`` (local SGD without an update in backward is an ordinary optimizer, and clears what a failure
left, but nothing else):

- A gradient that the library did not make is never cleared or overwritten.
- One that has been applied is never applied again. It stays readable until the model's next forward clears it.
- An edit of one that was applied in backward would be lost, so such gradients are handed over read-only, until
  ``step()``, or where the loop calls none, until the next forward. See [Note: applied gradients are read-only].
- One of which this rank has only a part, or whose memory was released, cannot be read, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from overlap._torch.read_only import Attempt
from overlap.errors import TrainingLoopError
from overlap.optim.applied import PassGradients, UsedValues, and_others
from overlap.optim.phases import (
    ADDED_TO_APPLIED,
    APPLIED_TWICE,
    CANNOT_DISCARD_UNDER_JOIN,
    REFUSED_ATTEMPTS,
    SECOND_BACKWARD,
    TRANSITIONS,
    Event,
    Form,
    Phase,
    Refusal,
)
from overlap.optim.scaler import Veto

__all__ = ["UpdateLifecycle", "refusals_told"]

_OF_PARTS = (Attempt.READ, Attempt.WRITE, Attempt.SEND)


@contextmanager
def refusals_told(lifecycles: Iterable[UpdateLifecycle]) -> Iterator[None]:
    """What the training loop calls, and may be refused on this rank alone: others learn of it where they wait."""
    try:
        yield
    except TrainingLoopError as error:
        for lifecycle in lifecycles:
            lifecycle.tell(error)
        raise


class UpdateLifecycle:
    """The phase of one model's update, and which of its gradients are the library's. See [Note: the update lifecycle].

    Args:
        form: how the update is made.
        clears: whether the gradient of a parameter is this update's to clear.
        groups: the parameter groups whose hyperparameters an update in backward uses.
    """

    def __init__(
        self,
        form: Form,
        *,
        clears: Callable[[Tensor], bool],
        groups: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        self.form = form
        self.phase = Phase.IDLE
        self.outcome = form.outcome
        """Where the last backward led, or the one under way leads: as the form says, unless its update was skipped."""
        self.names: Mapping[Tensor, str] = {}
        """The model's parameters, where they are known."""
        self.sees_forwards = False
        """Whether :meth:`on_forward` is called; a hook that is registered with DDP itself is not told of forwards."""
        self.is_joining: Callable[[], bool] = lambda: False
        """Whether ranks that have run out of inputs make the updates of others as they are reduced."""
        self.tell: Callable[[BaseException], None] = lambda error: None
        """Tells the other ranks of a refusal: they would wait for this one."""
        self.note_unfinished: Callable[[], None] = lambda: None
        """Has DDP forget a backward that it has prepared, before the next forward."""
        self.veto = Veto()
        """Whether the update of the last backward is to change nothing."""
        self.has_parts = False
        """Whether ``.grad`` is the mean only where this rank owns it, after the last backward."""
        self.gradients = PassGradients(clears, error=self._error_for, on_zero=self._on_zero)
        self._is_replay = False
        self._groups = groups
        self._used: UsedValues | None = None

    @property
    def is_replay(self) -> bool:
        """Whether the last backward was a replay, so that no ``.grad`` came of it on this rank."""
        return self._is_replay

    @property
    def leaves_update(self) -> bool:
        """Whether the update of the last backward (or of the one under way) is left to ``step()``."""
        return self.outcome is Phase.REDUCED

    # Events.

    def on_forward(self) -> None:
        """A forward that records gradients begins; clears what has been applied.

        Raises:
            TrainingLoopError: ``step()`` is due, and the loop has put something else into ``.grad``.
        """
        self._clear_before_pass()
        if self.phase is Phase.REDUCED and all(p.grad is None for p in self.gradients.reduced.values()):
            self.on_zero_grad()  # The loop has cleared them by itself.
        self._move(Event.FORWARD)
        if self.phase is Phase.FORWARD:
            self.gradients.forget()
        else:
            reduced = self.gradients.reduced
            for key in [key for key, parameter in reduced.items() if parameter.grad is None]:
                del reduced[key]

    def on_backward(self, *, is_replay: bool, outcome: Phase | None = None) -> None:
        """The first bucket has come, of a backward that leads to ``outcome``; to the form's own where ``None``.

        Raises:
            TrainingLoopError: ``step()`` is still due for the backward before.
        """
        if self.phase is Phase.FAILED and not self.sees_forwards:
            self.phase = Phase.IDLE
        if is_replay:
            self._begin_replay()
        elif self.phase is Phase.REDUCED and not self.form.adds_up:
            self._refuse(SECOND_BACKWARD)
        elif self.phase is Phase.REDUCED and self.is_joining():
            self._refuse(replace(CANNOT_DISCARD_UNDER_JOIN, then=Phase.FAILED))
        elif self.phase is Phase.STEPPED and self.sees_forwards and self.gradients.has_added_to_applied():
            self._refuse(ADDED_TO_APPLIED)
        else:
            self._move(Event.BACKWARD)
        self.outcome = outcome or self.form.outcome
        self._is_replay = is_replay
        self._used = None
        self.veto.clear()
        self.gradients.begin_pass()

    def _begin_replay(self) -> None:
        self._clear_before_pass()
        if self.phase is Phase.REDUCED and self._is_replay:
            self.phase = Phase.IDLE  # The others have discarded that backward.
        self._move(Event.REPLAY)

    def _clear_before_pass(self) -> None:
        if self.phase is Phase.FAILED:
            self.gradients.clear_all(self.names)
        elif self.phase in (Phase.APPLIED, Phase.STEPPED):
            self._refuse_replaced()
            self.gradients.clear_applied()

    def on_reduced(self, outcome: Phase | None = None) -> None:
        """All buckets are through and DDP has set ``.grad``; ``outcome`` is the pass's own where ``None``."""
        self.phase = outcome or self.outcome
        if self._is_replay:
            self.gradients.is_replayed = True
            return
        if self.has_parts or self.phase is not Phase.REDUCED:
            self.gradients.hand_over(parts=self.has_parts, allows_unscaling=self.phase is Phase.REDUCED)
        if self.phase is Phase.APPLIED and self._groups is not None:
            self._used = UsedValues(self._groups, list(self.gradients.applied.values()))

    def on_step(self, updated: Iterable[Tensor] = ()) -> None:
        """``step()`` has made its update, of ``updated`` among others; :meth:`check_step` came first."""
        if self.phase in (Phase.REDUCED, Phase.APPLIED):
            self.gradients.note_applied([p for p in updated if id(p) in self.gradients.reduced])
            self.gradients.take_back()
            self.gradients.allows_unscaling = False
        self._used = None
        self.veto.clear()
        self._move(Event.STEP)

    def on_zero_grad(self, *, set_to_none: bool = True) -> None:
        """``zero_grad()`` is called, and clears what is there.

        Raises:
            TrainingLoopError: the update was made in backward, and ``step()`` is due.
        """
        self.check(Event.ZERO_GRAD)
        self.veto.clear()
        is_before_backward = self.phase in (Phase.FORWARD, Phase.STEPPED)
        self.gradients.note_zero_grad(set_to_none=set_to_none, restores=is_before_backward)
        self._move(Event.ZERO_GRAD)
        if self.phase is Phase.IDLE:
            self.gradients.forget()

    def on_load(self) -> None:
        """``load_state_dict()`` is called. Raises: TrainingLoopError: as :meth:`on_zero_grad`."""
        self._move(Event.LOAD)

    def on_failure(self) -> None:
        """A stage raised in backward."""
        self._used = None
        self._move(Event.FAILURE)

    def on_update_failure(self) -> None:
        """The optimizer raised in ``step()``."""
        self._move(Event.UPDATE_FAILURE)

    def on_remove(self) -> None:
        """The registration is removed: what has been applied must not be applied again by an optimizer left alone."""
        if self.phase is Phase.FAILED:
            self.gradients.clear_all(self.names)
        self.gradients.clear_for_good()
        self._used = None
        self.tell = lambda error: None
        self._move(Event.REMOVE)

    # What step() asks before it updates.

    def check(self, event: Event) -> None:
        """Raises: TrainingLoopError: ``event`` is refused in this phase."""
        outcome = TRANSITIONS[event][self.phase]
        if isinstance(outcome, Refusal):
            self._refuse(outcome)
        if event is Event.ZERO_GRAD and self.phase is Phase.REDUCED and self.is_joining():
            self._refuse(CANNOT_DISCARD_UNDER_JOIN)

    def check_step(self) -> None:
        """Raises: TrainingLoopError: ``step()`` cannot be called now, or the loop has changed a gradient, parameter or
        hyperparameter that the update used."""
        self.check(Event.STEP)
        self._refuse_replaced()
        used, self._used = self._used, None  # Report each change only once.
        if used is not None and self.phase is Phase.APPLIED:
            used.refuse_changes(self.names, step=self.form.step, deferred=self.form.deferred)

    def check_reduced(self, pending: Iterable[Tensor], *, applies_what_the_user_set: bool = True) -> None:
        """Raises: TrainingLoopError: a gradient that ``step()`` would apply is this rank's own, and not the mean."""
        if self.phase is Phase.IDLE and applies_what_the_user_set:
            return  # No forward came before: the user set these gradients, to have the optimizer make its state, say.
        local = [p for p in pending if p in self.names and id(p) not in self.gradients.reduced]
        if applies_what_the_user_set:
            local = _nonzero(local)
        if local:
            raise TrainingLoopError(
                f"{self.form.step} cannot apply gradients that were not reduced over ranks "
                f"({self.names[local[0]]}{and_others(local)}): the backward ran under no_sync(), or did not reach "
                "every parameter"
            )

    def check_once(self, *, is_all: bool = True) -> None:
        """Raises: TrainingLoopError: nothing is there to apply but what has been applied already, or the loop has
        changed that since, so that plain DDP would apply it again; ``is_all``: nothing else is to be applied."""
        if self.phase is not Phase.STEPPED:
            return
        is_over = is_all and self.form.outcome is not Phase.STEPPED
        if (is_over and self.gradients.has_left()) or self.gradients.has_changed_applied():
            self._refuse(APPLIED_TWICE)

    def _refuse_replaced(self) -> None:
        """Raises: TrainingLoopError: between an update in backward and ``step()`` the loop has put something else into
        ``.grad``, or ``None``; once."""
        if self.phase is Phase.APPLIED and (replaced := self.gradients.take_replaced()):
            raise self._error_for(replaced[0], Attempt.WRITE, others=and_others(replaced))

    def _error_for(self, parameter: Tensor | None, attempt: Attempt, others: str = "") -> TrainingLoopError:
        """The error for an attempt to use a gradient that was handed over."""
        form = self.form
        name = "a parameter" if parameter is None else self.names.get(parameter, "a parameter")
        if id(parameter) in self.gradients.released and attempt not in (Attempt.ACCUMULATE, Attempt.UNSCALE):
            text = REFUSED_ATTEMPTS["released"]
        elif self.has_parts and self.phase in (Phase.REDUCED, Phase.FAILED) and attempt is Attempt.ACCUMULATE:
            text = REFUSED_ATTEMPTS["accumulate part"]
            # Raised before DDP has seen a gradient of this backward, which it would wait for in the next forward.
            self.note_unfinished()
        elif attempt is Attempt.ACCUMULATE and self.phase is Phase.STEPPED and form.outcome is not Phase.STEPPED:
            text = REFUSED_ATTEMPTS["accumulate applied"]
        elif self.has_parts and attempt in _OF_PARTS:
            text = REFUSED_ATTEMPTS["part"]
        else:
            text = REFUSED_ATTEMPTS[attempt.value]
        step = "the next forward" if form.outcome is Phase.STEPPED else form.step
        return TrainingLoopError(
            text.format(name=name + others, step=step, deferred=form.deferred, edits=form.edits, clip=form.clip)
        )

    def _on_zero(self) -> None:
        if self.phase is Phase.APPLIED:
            self.check(Event.ZERO_GRAD)

    # The table.

    def _move(self, event: Event) -> None:
        outcome = TRANSITIONS[event][self.phase]
        if isinstance(outcome, Refusal):
            self._refuse(outcome)
        else:
            self.phase = outcome

    def _refuse(self, refusal: Refusal) -> None:
        reduced, owns = self.gradients.reduced, self.gradients.owns
        missing = [name for parameter, name in self.names.items() if id(parameter) not in reduced and owns(parameter)]
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        self.phase = refusal.then or self.phase
        form = self.form
        raise TrainingLoopError(
            refusal.message.format(step=form.step, deferred=form.deferred, skip=form.skip, missing=listed)
        )


def _nonzero(parameters: list[Tensor]) -> list[Tensor]:
    """Those whose gradient has a value that is not zero; the host waits for all of them at once."""
    present = [parameter for parameter in parameters if parameter.grad is not None]
    flags = torch.stack([p.grad.any() for p in present if p.grad is not None]).tolist() if present else []
    return [parameter for parameter, is_nonzero in zip(present, flags, strict=True) if is_nonzero]
