"""The lifecycle of an update: the calls that a training loop may make in each phase, and the error for any other.

[Note: the update lifecycle]

An update that is not made in ``optimizer.step()`` must be exactly plain DDP's, or an error. Which one depends on
whether gradients are there, are the mean over ranks, have been applied: that is one :class:`Phase`, and
:data:`TRANSITIONS` lists the phase that follows each event, and the events that are refused. A comment in the table
marks the entries that depend on the gradients, too; :class:`UpdateLifecycle` refuses those. ``Step``, ``ZeroStep`` and
local SGD use it alike. ``docs/reports/phases.md`` shows the table as a picture; ``gradients.py`` says what happens to
``.grad``, and ``Update.steps`` in ``update.py`` leaves, holds or makes the update of a bucket.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.autograd import backward_id, before_accumulation, is_inside_of_another
from overlap._torch.optimizer import is_around
from overlap._torch.read_only import DeniedAccess, GradAccessPolicy, GuardedGradient
from overlap.errors import TrainingLoopError, hide_internal_frames
from overlap.hooks.stage import StageContext
from overlap.optim.gradients import PassGradients, StepInputs, and_others
from overlap.optim.stepper import FoundInf

_NO_VERDICT = FoundInf()


class Phase(enum.Enum):
    """Where a training loop stands with one model and the optimizer that updates it."""

    IDLE = "idle"
    """No gradient is the library's. A backward under ``no_sync`` leaves this rank's own gradients, and the phase."""
    BACKWARD = "backward"
    """Buckets arrive; or backward ended before all had arrived."""
    REDUCED = "reduced"
    """``.grad`` is the mean over ranks, and ``step()`` updates with it."""
    APPLIED = "applied"
    """The update was made in backward; ``step()`` is due."""
    STEPPED = "stepped"
    """The update is complete. ``.grad`` holds the applied gradients until the next forward."""
    FAILED = "failed"
    """Backward or the update raised: ``.grad`` is neither this rank's own nor the mean."""


class Event(enum.Enum):
    """An action of a training loop, as the lifecycle sees it."""

    FORWARD = "forward"
    """A forward of the DDP model that records gradients begins."""
    BACKWARD = "backward"
    """The first bucket of a backward that synchronizes gradients has arrived."""
    REPLAY = "replay"
    """The same on a rank without inputs, under ``Join``."""
    STEP = "step()"
    ZERO_GRAD = "zero_grad()"
    LOAD = "load_state_dict()"
    FAILURE = "exception in backward"
    """A stage raised."""
    UPDATE_FAILURE = "exception in the update"
    """The optimizer raised in ``step()``."""
    REMOVE = "remove()"


@dataclass(frozen=True)
class Refusal:
    """The event is an error, and leads to ``then`` (or leaves the phase as it is)."""

    message: str
    then: Phase | None = None


_SECOND_BACKWARD = Refusal(
    "a second backward began before step() was called for the first: {adds_up}call {step} after each synchronized "
    "backward, or run all but the last forward and backward of a step, both of them, under ddp.no_sync(), and forwards "
    "that no backward follows under torch.no_grad(); run the backward of a loss that is not this optimizer's, such as "
    "a generator's, in `with {skip}:`",
    then=Phase.FAILED,
)
_ADDED_TO_APPLIED = Refusal(
    "a backward adds to gradients that have been applied, since no forward of ddp came after {step} to clear them: "
    "call ddp(x), not model(x) or ddp.module(x), and where a forward came before {step}, zero_grad() after it",
    then=Phase.FAILED,
)
_APPLIED_TWICE = Refusal(
    "{step} was called again for a backward whose gradients have been applied: first run a forward, by ddp(x) and not "
    "model(x) or ddp.module(x), and a backward, or call zero_grad() between"
)
_ADDED_TO_FAILED = Refusal(
    "the previous backward failed and left gradients, and this one was added to them: call zero_grad() after a "
    "failure, or run a forward before the next backward",
    then=Phase.FAILED,
)
_INCOMPLETE = Refusal(
    "backward has not reached every parameter: no gradient for some of {missing}; use "
    "DistributedDataParallel(find_unused_parameters=True) if part of the model takes no part in the loss"
)
_FAILED = Refusal(
    "the last backward or update raised, so gradients are neither this rank's own nor the mean, and {step} cannot "
    "apply them: discard them with zero_grad(), or run forward and backward again"
)
_TOO_LATE = (
    " between backward and {step}, but the update was made in backward already, and plain DDP makes it in {step}: use "
    "{deferred}, or call {step} first"
)
_CHANGED = "{change}" + _TOO_LATE
_CANNOT_LOAD = Refusal("load_state_dict()" + _TOO_LATE)
_CANNOT_DISCARD = Refusal(
    "zero_grad()" + _TOO_LATE + "; if the loss is not this optimizer's, run its backward in `with {skip}:`"
)
_CANNOT_DISCARD_UNDER_JOIN = Refusal(
    "under Join a backward cannot be discarded or added to before {step}: ranks that have run out of inputs have made "
    "its update already; call {step} after each synchronized backward"
)
SCALED_IN_BACKWARD = (
    "GradScaler decides after backward whether to step, but the parameters were updated in backward; use {deferred} "
    "with it"
)
SCALED_UNDER_JOIN = (
    "GradScaler decides after backward whether to step, and ranks that have run out of inputs are not told: leave the "
    "scaler out under Join (bfloat16 needs none), or give every rank the same number of batches"
)
_WRITTEN = (
    "the gradient of {name} cannot be changed after backward: its update was made in backward. Use {edits}, which is "
    "exact for any edit; or ClipGradNorm(max_norm) in the chain to clip, torch.nn.utils.get_total_norm(gradients) to "
    "read a norm, and a .clone() to send it by a collective"
)
_PART_USED = (
    "the gradient of {name} is the mean over ranks only where this rank owns it, so it can neither be read nor changed "
    "after backward: use {edits}, which has the whole mean on every rank and is exact for any edit; or to clip, "
    "ClipGradNorm(max_norm) in the chain, or zero.clip_grad_norm_(max_norm) with {deferred}"
)
_RELEASED_USED = (
    "the gradient of {name} was released in backward, so it can neither be read nor changed: use {edits}, which is "
    "exact for any edit, release_gradients=False to read it, or ClipGradNorm(max_norm) in the chain to clip"
)
_ANOTHER_STEPS = (
    "step() of another {other} uses the gradient of {name}, which the {own} of the chain applies, too, so both would "
    "update it: leave that call out{instead}, or give that optimizer to the chain"
)
_ACCUMULATED = (
    "a second backward began before {step}, and adds to the gradient of {name}, which the first one has reduced: call "
    "backward once, on the sum of the losses, run all but the last forward and backward of a step under "
    "ddp.no_sync(), or use {edits}"
)
_NOT_CLEARED = (
    "a second backward began before the next forward or zero_grad(), and adds to the gradient of {name}, which was "
    "applied: call zero_grad() before each backward, since a hook of ddp.register_comm_hook sees no forward; and for "
    "one step of several losses call backward once, on their sum"
)
_REENTRANT = (
    "{name} gets another gradient after the one that was reduced: a checkpoint with use_reentrant=True runs a backward "
    "inside of the model's, at whose end all buckets were there already. Use checkpoint(..., use_reentrant=False), or "
    "DistributedDataParallel(..., static_graph=True)"
)
_UNREDUCED = (
    "{step} cannot apply gradients that were not reduced over ranks ({names}): for the last forward and backward of a "
    "step call ddp(x), not model(x) or ddp.module(x), outside of ddp.no_sync(), and backward() without inputs=...; "
    "freeze or unfreeze parameters before DistributedDataParallel is made. Gradients that the loop computes itself, by "
    "torch.autograd.grad, say, are reduced by torch.autograd.backward(list(ddp.parameters()), gradients) after a "
    "forward of ddp, in place of p.grad = ..."
)
_LEFT_WITHOUT_STEP = Refusal(
    "this rank ran out of inputs between backward and {step}, so its last gradients were never applied: call {step} "
    "before the loop ends"
)

_AS_BEFORE: Mapping[Phase, Phase | Refusal] = {phase: phase for phase in Phase}

TRANSITIONS: Mapping[Event, Mapping[Phase, Phase | Refusal]] = {
    Event.FORWARD: {
        Phase.IDLE: Phase.IDLE,
        Phase.BACKWARD: Phase.BACKWARD,  # DDP itself refuses this forward, with its own error.
        Phase.REDUCED: Phase.REDUCED,  # Gradients that step() is to apply are kept.
        Phase.APPLIED: Phase.APPLIED,  # Applied gradients are cleared; step() is still due.
        Phase.STEPPED: Phase.IDLE,  # Applied gradients are cleared.
        Phase.FAILED: Phase.IDLE,  # Everything is cleared.
    },
    Event.BACKWARD: {
        Phase.IDLE: Phase.BACKWARD,
        Phase.BACKWARD: Phase.BACKWARD,
        Phase.REDUCED: Phase.BACKWARD,  # Adds up, as in plain DDP; refused where .grad is the mean in part only.
        Phase.APPLIED: _SECOND_BACKWARD,
        Phase.STEPPED: Phase.BACKWARD,  # Refused where it has added to applied gradients, for want of a forward.
        Phase.FAILED: _ADDED_TO_FAILED,  # A forward leads out; where none is seen, the loop clears gradients itself.
    },
    Event.REPLAY: {
        Phase.IDLE: Phase.BACKWARD,
        Phase.BACKWARD: Phase.BACKWARD,
        Phase.REDUCED: _LEFT_WITHOUT_STEP,
        Phase.APPLIED: Phase.BACKWARD,
        Phase.STEPPED: Phase.BACKWARD,
        Phase.FAILED: Phase.BACKWARD,
    },
    Event.STEP: {
        Phase.IDLE: Phase.IDLE,  # Refused where a gradient is this rank's own.
        Phase.BACKWARD: _INCOMPLETE,
        Phase.REDUCED: Phase.STEPPED,
        Phase.APPLIED: Phase.STEPPED,  # Refused where the loop has put another .grad.
        Phase.STEPPED: Phase.STEPPED,  # Refused where only applied gradients are there.
        Phase.FAILED: _FAILED,
    },
    Event.ZERO_GRAD: {
        Phase.IDLE: Phase.IDLE,
        Phase.BACKWARD: Phase.BACKWARD,
        Phase.REDUCED: Phase.IDLE,  # Discards the backward.
        Phase.APPLIED: _CANNOT_DISCARD,
        Phase.STEPPED: Phase.IDLE,
        Phase.FAILED: Phase.IDLE,
    },
    Event.LOAD: {**_AS_BEFORE, Phase.APPLIED: _CANNOT_LOAD},
    Event.FAILURE: dict.fromkeys(Phase, Phase.FAILED),
    Event.UPDATE_FAILURE: {
        **_AS_BEFORE,  # The gradients that failed to be applied were the user's own.
        Phase.REDUCED: Phase.FAILED,
        Phase.APPLIED: Phase.FAILED,
    },
    Event.REMOVE: dict.fromkeys(Phase, Phase.IDLE),
}
"""The phase that follows each event, by the phase before it. After a backward it is :attr:`Form.outcome`."""


@dataclass(frozen=True)
class Form:
    """When and how one update is made, and the names of its remedies in messages.

    *Interleaved*: in backward, a bucket that is reduced is updated when the next one arrives. *Deferred*: all are
    updated at once, by the loop's ``step()``, or if *automatic*, with the last bucket. A loop calls no ``step()`` of
    automatic updates.
    """

    call: str
    """The loop's call of ``step()``."""
    deferred_code: str
    """How to write the deferred form."""
    edits: str = ""
    """The form whose gradients are the whole mean, and the loop's to edit."""
    skip: str = "optimizer.skip_update()"
    """How to run a backward without an update."""
    adds_up: bool = True
    """Whether a second backward before ``step()`` adds up as in plain DDP, where all of ``.grad`` is the mean."""
    is_deferred: bool = False
    is_automatic: bool = False
    owner: str = ""
    """The optimizer, where its chain has several updates."""

    @property
    def step(self) -> str:
        """The call of ``step()`` in messages."""
        return f"{self.call} of {self.owner}" if self.owner else self.call

    @cached_property
    def leads_to(self) -> Phase:
        """The phase after backward: ``REDUCED`` if ``step()`` updates, ``APPLIED`` if backward did and the loop calls
        ``step()``, ``STEPPED`` if backward did and it does not."""
        if self.is_automatic:
            return Phase.STEPPED
        return Phase.REDUCED if self.is_deferred else Phase.APPLIED


@dataclass(frozen=True)
class report_refusals:  # noqa: N801 (used as a function)
    """Report a refusal inside the block to the other ranks, which would wait for this one."""

    lifecycles: Iterable[UpdateLifecycle]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TrainingLoopError):
            for lifecycle in self.lifecycles:
                if lifecycle.context is not None:
                    lifecycle.context.report(error)
            hide_internal_frames(error)


class UpdateLifecycle(GradAccessPolicy):
    """The phase of one model's update, and which of its gradients are the library's. See [Note: the update lifecycle].

    Args:
        form: how the update is made.
        clears: whether the gradient of a parameter is this update's to clear.
        optimizer: the loop's, whose hyperparameters an update in backward uses.
    """

    def __init__(
        self,
        form: Form,
        *,
        clears: Callable[[Tensor], bool],
        optimizer: Any = None,
    ) -> None:
        self.form = form
        self.phase = Phase.IDLE
        self.outcome = form.leads_to
        """The phase after the last backward, or the one under way: the form's own, unless its update was skipped."""
        self.context: StageContext | None = None
        """Of the model, while the update is registered."""
        self.names: Mapping[Tensor, str] = {}
        """The model's parameters, where they are known."""
        self.verdict = _NO_VERDICT
        """A stage's, of the last backward: whether the update is to change nothing."""
        self.is_replay = False
        """Whether the last backward was a replay, so that no ``.grad`` came of it on this rank."""
        self.gradients = PassGradients(clears, policy=self)
        self.others: Sequence[UpdateLifecycle] = ()
        """Of the other updates of the chain."""
        self._optimizer = optimizer
        self._used: StepInputs | None = None
        # The autograd pass at whose end all buckets were through; and where another one goes on then, the functions
        # that end the watch of it.
        self._ended = -1
        self._watched: list[Callable[[], None]] = []
        # The move of a parameter since its update, in words.
        self._moved: str | None = None

    def attach(self, context: StageContext) -> None:
        self.context, self.names = context, context.names or {}

    @property
    def sees_forwards(self) -> bool:
        """Whether :meth:`on_forward` is called; not for a hook that is registered with DDP itself."""
        return self.context is not None and self.context.names is not None

    def is_joining(self) -> bool:
        """Whether ranks that have run out of inputs make the updates of others as they are reduced."""
        return self.context is not None and self.context.is_joining()

    # Events.

    def on_forward(self) -> None:
        """A forward that records gradients begins; clears applied gradients.

        Raises:
            TrainingLoopError: ``step()`` is due, and the loop has put something else into ``.grad``.
        """
        self._unwatch()
        self._clear_before_pass()
        if self.phase is Phase.REDUCED and all(p.grad is None for p in self.gradients.reduced.values()):
            self.on_zero_grad()  # The loop has cleared them by itself.
        self.phase = self.check(Event.FORWARD)
        if self.phase is Phase.IDLE:
            self.gradients.forget()
        else:
            reduced = self.gradients.reduced
            for key in [key for key, parameter in reduced.items() if parameter.grad is None]:
                del reduced[key]

    def on_backward(self, *, is_replay: bool, outcome: Phase | None = None) -> None:
        """The first bucket has arrived, of a backward that leads to ``outcome``; to the form's own where ``None``.

        Raises:
            TrainingLoopError: ``step()`` is still due for the backward before.
        """
        if self.phase is Phase.FAILED and not self.sees_forwards:
            self.phase = Phase.IDLE
        if is_replay:
            self._clear_before_pass()
            if self.phase is Phase.REDUCED and self.is_replay:
                self._commit_or_discard(is_made=False)
                self.phase = Phase.IDLE  # The others have discarded that backward.
            self.phase = self.check(Event.REPLAY)
        elif self.phase is Phase.REDUCED and (self.gradients.has_parts or not self.form.adds_up):
            self._raise(_SECOND_BACKWARD)
        elif self.phase is Phase.REDUCED and self.is_joining():
            self._raise(replace(_CANNOT_DISCARD_UNDER_JOIN, then=Phase.FAILED))
        elif self.phase is Phase.STEPPED and self.sees_forwards and self.gradients.has_added_to_applied():
            self._raise(_ADDED_TO_APPLIED)
        else:
            self.phase = self.check(Event.BACKWARD)
        self.outcome = outcome or self.form.leads_to
        self.is_replay = is_replay
        self._used = self._moved = None
        self.verdict = _NO_VERDICT
        self.gradients.begin_pass()

    def _clear_before_pass(self) -> None:
        if self.phase is Phase.FAILED:
            self.gradients.clear_all(self.names)
        elif self.phase in (Phase.APPLIED, Phase.STEPPED):
            self._refuse_replaced()
            self.gradients.clear_applied(is_replay=self.is_replay)

    def on_reduced(self, outcome: Phase | None = None) -> None:
        """All buckets are through and DDP has set ``.grad``; ``outcome`` is the pass's own where ``None``."""
        self.phase = outcome or self.outcome
        if self.phase is not Phase.REDUCED:
            self._commit_or_discard(is_made=True, found_inf=self.verdict.found_inf)
        self._ended = backward_id()
        if self.is_replay:
            return
        if self.phase is Phase.REDUCED and not self.gradients.has_parts and is_inside_of_another():
            self._watched = [
                before_accumulation(p, partial(self._refuse_trailing, p)) for p in self.gradients.reduced.values()
            ]
        if self.gradients.has_parts or self.phase is not Phase.REDUCED:
            self.gradients.wrap_grads()
        if self.phase is Phase.APPLIED and self._optimizer is not None:
            self._used = StepInputs(self._optimizer.param_groups, list(self.gradients.applied.values()))

    def _refuse_trailing(self, parameter: Tensor, gradients: Any) -> None:
        if self._is_trailing:
            self.phase = Phase.FAILED
            raise self._error_for(parameter, DeniedAccess.ACCUMULATE)

    @property
    def _is_trailing(self) -> bool:
        """Whether the backward that runs is the one inside of which the last pass has ended."""
        return -1 < backward_id() < self._ended

    def _unwatch(self) -> None:
        for undo in self._watched:
            undo()
        self._watched = []

    def on_step(self, updated: Iterable[Tensor] = (), *, verdict: FoundInf = _NO_VERDICT) -> None:
        """``step()`` has made its update, of ``updated`` among others, unless by ``verdict``; :meth:`check_step` came
        first."""
        if self.phase is Phase.REDUCED:
            self._commit_or_discard(is_made=True, found_inf=verdict.found_inf)
        if self.phase in (Phase.REDUCED, Phase.APPLIED):
            reduced = self.gradients.reduced
            self.gradients.note_applied([p for p in updated if id(p) in reduced] if updated else ())
            self.gradients.unwrap_grads()
        self._used = None
        self.verdict = _NO_VERDICT
        self.phase = self.check(Event.STEP)

    def on_zero_grad(self, *, set_to_none: bool = True) -> None:
        """``zero_grad()`` is called, and clears all gradients.

        Raises:
            TrainingLoopError: the update was made in backward, and ``step()`` is due.
        """
        self.check(Event.ZERO_GRAD)
        self.verdict = _NO_VERDICT
        # Where gradients stay as zeros, stages do not see that accumulated ones are gone.
        if self.phase is Phase.REDUCED or (self.phase is Phase.IDLE and not set_to_none):
            self._commit_or_discard(is_made=False)
        is_before_backward = self.phase in (Phase.IDLE, Phase.STEPPED)
        self.gradients.note_zero_grad(set_to_none=set_to_none, restores=is_before_backward)
        self.phase = self.check(Event.ZERO_GRAD)
        if self.phase is Phase.IDLE:
            self.gradients.forget()

    def on_failure(self) -> None:
        self._used = None
        self.phase = self.check(Event.FAILURE)

    def on_update_failure(self) -> None:
        if self.phase is Phase.REDUCED:
            self._commit_or_discard(is_made=False)
        self.phase = self.check(Event.UPDATE_FAILURE)

    def on_remove(self) -> None:
        """The registration is removed: an optimizer that is left alone must not apply gradients again."""
        if self.phase is Phase.FAILED:
            self.gradients.clear_all(self.names)
        self._unwatch()
        self.gradients.clear_for_good()
        self._used = self.context = None
        self.phase = self.check(Event.REMOVE)

    def _commit_or_discard(self, *, is_made: bool, found_inf: Tensor | None = None) -> None:
        """The step is made or not, so the stages' memory stays or is taken back, but for parameters that the chain's
        other updates step."""
        if self.context is not None:
            others = self.others and (lambda parameter: any(one.gradients.owns(parameter) for one in self.others))
            if is_made:
                self.context.commit(found_inf, others=others or None)
            else:
                self.context.discard(others=others or None)

    # Checks of step() before it updates.

    def check(self, event: Event) -> Phase:
        """The phase that follows ``event``. Raises: TrainingLoopError: it is refused in this one."""
        following = TRANSITIONS[event][self.phase]
        if isinstance(following, Refusal):
            self._raise(following)
        if event is Event.ZERO_GRAD and self.phase is Phase.REDUCED and self.is_joining():
            self._raise(_CANNOT_DISCARD_UNDER_JOIN)
        return following

    def check_step(self) -> None:
        """Raises: TrainingLoopError: ``step()`` cannot be called now, or the loop has changed a gradient, parameter or
        hyperparameter that the update used."""
        self.check(Event.STEP)
        self._refuse_replaced()
        used, self._used, moved, self._moved = self._used, None, self._moved, None  # Report each change only once.
        if used is None or self._optimizer is None or self.phase is not Phase.APPLIED:
            return
        if (changed := moved or used.changed(self._optimizer.param_groups, self.names)) is not None:
            form = self.form
            raise TrainingLoopError(_CHANGED.format(change=changed, step=form.step, deferred=form.deferred_code))

    def check_reduced(self, pending: Iterable[Tensor], *, allows_zeros: bool) -> None:
        """Raises: TrainingLoopError: a gradient that ``step()`` would apply is this rank's own, not the mean; zeros,
        with which an optimizer makes its state, are the same on every rank."""
        reduced = self.gradients.reduced
        local = [p for p in pending if id(p) not in reduced and p in self.names]
        if local and allows_zeros:
            # The host waits for all of them at once.
            flags = torch.stack([p.grad.any() for p in local if p.grad is not None]).tolist()
            local = list(compress(local, flags))
        if local:
            names = self.names[local[0]] + and_others(local)
            raise TrainingLoopError(_UNREDUCED.format(step=self.form.step, names=names))

    def check_once(self, *, is_all: bool) -> None:
        """Raises: TrainingLoopError: only applied gradients are there (``is_all``: nothing else is to be applied), or
        the loop has changed one since, so that plain DDP would apply it again."""
        if self.phase is not Phase.STEPPED:
            return
        is_over = is_all and self.form.leads_to is not Phase.STEPPED
        if (is_over and self.gradients.has_applied()) or self.gradients.has_changed_applied():
            self._raise(_APPLIED_TWICE)

    def _refuse_replaced(self) -> None:
        """Raises: TrainingLoopError: between an update in backward and ``step()`` the loop has put something else into
        ``.grad``, or ``None``; once."""
        if self.phase is Phase.APPLIED and (replaced := self.gradients.take_replaced()):
            raise self._error_for(replaced[0], DeniedAccess.WRITE, others=and_others(replaced))

    def _error_for(self, parameter: Tensor | None, attempt: DeniedAccess, others: str = "") -> TrainingLoopError:
        """The error for an attempt to use a gradient that was handed over."""
        form, gradients, has_step = self.form, self.gradients, self.form.leads_to is not Phase.STEPPED
        if attempt is DeniedAccess.UNSCALE:
            message = SCALED_IN_BACKWARD
        elif attempt is DeniedAccess.ACCUMULATE and self._is_trailing:
            message = _REENTRANT
        elif attempt is DeniedAccess.ACCUMULATE:
            message = _ADDED_TO_APPLIED.message if self.phase is Phase.STEPPED and has_step else _ACCUMULATED
            if self.phase is Phase.STEPPED and not (has_step or self.sees_forwards):
                message = _NOT_CLEARED
            if gradients.has_parts and self.phase in (Phase.REDUCED, Phase.FAILED) and self.context is not None:
                # Raised before DDP has seen a gradient of this backward, which it would wait for in the next forward.
                self.context.note_unfinished()
        elif gradients.has_parts and id(parameter) not in gradients.released:
            message = _PART_USED
        else:  # A whole gradient that cannot be read was released, perhaps in an earlier backward.
            is_released = attempt is DeniedAccess.READ or id(parameter) in gradients.released
            message = _RELEASED_USED if is_released else _WRITTEN
        name = self._name_of(parameter)
        step = form.step if has_step else "the next forward"
        words = {"step": step, "deferred": form.deferred_code, "edits": form.edits}
        return TrainingLoopError(message.format(name=name + others, **words))

    def _name_of(self, parameter: Tensor | None) -> str:
        return "a parameter" if parameter is None else self.names.get(parameter, "a parameter")

    # GradAccessPolicy: the loop uses a gradient that was handed over.

    @property
    def allows_unscaling(self) -> bool:
        return self.phase is Phase.REDUCED

    def check_optimizer(self, gradient: GuardedGradient, optimizer: Optimizer) -> None:
        own = self._optimizer
        if own is None or is_around(optimizer, own) or optimizer is own.stepped:
            return
        instead = "" if self.form.is_automatic else f" and call {self.form.step}"
        other, mine, name = type(optimizer).__name__, type(own.stepped).__name__, self._name_of(gradient.parameter())
        raise TrainingLoopError(_ANOTHER_STEPS.format(other=other, name=name, own=mine, instead=instead))

    def follow(self, gradient: GuardedGradient, moved: Tensor) -> None:
        self.gradients.follow(gradient, moved)
        if self.phase is Phase.APPLIED and self._moved is None:
            name = self._name_of(gradient.parameter())
            self._moved = f"{name} was moved to another dtype, device or memory format"

    def refuse(self, gradient: GuardedGradient, attempt: DeniedAccess) -> NoReturn:
        raise self._error_for(gradient.parameter(), attempt)

    @torch.no_grad()
    def zero(self, gradient: GuardedGradient) -> None:
        if self.phase is Phase.APPLIED:
            self.check(Event.ZERO_GRAD)
        parameter = gradient.parameter()
        if parameter is None or parameter.grad is not gradient:
            self.refuse(gradient, DeniedAccess.WRITE)
        parameter.grad = torch.zeros_like(parameter) if gradient.plain is None else gradient.plain.zero_()

    def _raise(self, refusal: Refusal) -> NoReturn:
        reduced, owns, form = self.gradients.reduced, self.gradients.owns, self.form
        missing = [name for parameter, name in self.names.items() if id(parameter) not in reduced and owns(parameter)]
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        adds_up = f"use {form.edits}, whose backwards add up as in plain DDP; or " if form.adds_up else ""
        self.phase = refusal.then or self.phase
        words = {"step": form.step, "deferred": form.deferred_code, "skip": form.skip}
        raise TrainingLoopError(refusal.message.format(missing=listed, adds_up=adds_up, **words))
