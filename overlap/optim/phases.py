"""The phases of an update, the events that lead from one to another, and those that are errors.

See [Note: the update lifecycle] in :mod:`overlap.optim.lifecycle`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "ADDED_TO_APPLIED",
    "APPLIED_TWICE",
    "CANNOT_DISCARD_UNDER_JOIN",
    "REFUSED_ATTEMPTS",
    "SCALED_IN_BACKWARD",
    "SCALED_UNDER_JOIN",
    "SECOND_BACKWARD",
    "TRANSITIONS",
    "UNREDUCED",
    "Event",
    "Form",
    "Phase",
    "Refusal",
]


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


SECOND_BACKWARD = Refusal(
    "a second backward began before step() was called for the first: {adds_up}call {step} after each synchronized "
    "backward, or run all but the last forward and backward of a step, both of them, under ddp.no_sync(), and forwards "
    "that no backward follows under torch.no_grad(); run the backward of a loss that is not this optimizer's, such as "
    "a generator's, in `with {skip}:`",
    then=Phase.FAILED,
)
ADDED_TO_APPLIED = Refusal(
    "a backward has added to gradients that had been applied already, since no forward came after {step} to clear "
    "them: call zero_grad() before a backward whose forward ran before {step}",
    then=Phase.FAILED,
)
APPLIED_TWICE = Refusal(
    "{step} was called again for a backward whose gradients have been applied: run forward and backward first, or call "
    "zero_grad() between"
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
_CANNOT_DISCARD = Refusal(
    "zero_grad() between backward and {step} would discard this backward, but its update was made in backward already: "
    "use {deferred}, whose update can still be skipped, or call {step} first; if the loss is not this optimizer's, "
    "run its backward in `with {skip}:`"
)
_CANNOT_LOAD = Refusal(
    "load_state_dict() between backward and {step}: the update was made in backward, with the state from before; use "
    "{deferred}, or call {step} first"
)
CANNOT_DISCARD_UNDER_JOIN = Refusal(
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
REFUSED_ATTEMPTS: Mapping[str, str] = {
    "write": "the gradient of {name} cannot be changed after backward: its update was made in backward. Use {edits}, "
    "which is exact for any edit; or {clip} to clip, and torch.nn.utils.get_total_norm(gradients) to read a norm",
    "part": "the gradient of {name} is the mean over ranks only where this rank owns it, so it can neither be read nor "
    "changed after backward: use {edits}, which has the whole mean on every rank and is exact for any edit; or {clip} "
    "to clip",
    "read": "the gradient of {name} can no longer be read: it was released, or this rank had only a part of it; keep a "
    ".clone() of a gradient that is needed later",
    "released": "the gradient of {name} was released in backward, so it can neither be read nor changed: use {edits}, "
    "which is exact for any edit, release_gradients=False to read it, or {clip} to clip",
    "accumulate": "a second backward began before {step}, and adds to the gradient of {name}, whose update was made in "
    "the first: use {edits}, or call backward once, on the sum of the losses",
    "accumulate part": "a second backward began before {step}, and adds to the gradient of {name}, of which this rank "
    "has only its part of the mean: call {step} after each synchronized backward, run all but the last under "
    "ddp.no_sync(), or use {edits}",
    "accumulate applied": "a backward adds to the gradient of {name}, which has been applied: call zero_grad() after "
    "{step}, or run a forward of the model first",
    "send": "the gradient of {name} cannot be sent by a collective: it is the mean over ranks, and its update was made "
    "in backward. Send a .clone(), or use {edits}",
    "unscale": SCALED_IN_BACKWARD,
}
"""Errors for uses of a gradient that was handed over, by :class:`~overlap._torch.read_only.Attempt`."""
UNREDUCED = (
    "{step} cannot apply gradients that were not reduced over ranks ({names}): {cause}. Gradients that the loop "
    "computes itself, by torch.autograd.grad, say, are reduced by torch.autograd.backward(list(ddp.parameters()), "
    "gradients) after a forward of ddp outside of no_sync(), in place of p.grad = ..."
)
_LEFT_WITHOUT_STEP = Refusal(
    "this rank ran out of inputs between backward and {step}, so its last gradients were never applied: call {step} "
    "before the loop ends"
)

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
        Phase.APPLIED: SECOND_BACKWARD,
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
    Event.LOAD: {
        Phase.IDLE: Phase.IDLE,
        Phase.BACKWARD: Phase.BACKWARD,
        Phase.REDUCED: Phase.REDUCED,
        Phase.APPLIED: _CANNOT_LOAD,
        Phase.STEPPED: Phase.STEPPED,
        Phase.FAILED: Phase.FAILED,
    },
    Event.FAILURE: dict.fromkeys(Phase, Phase.FAILED),
    Event.UPDATE_FAILURE: {
        **{phase: phase for phase in Phase},  # What failed to be applied was the user's own.
        Phase.REDUCED: Phase.FAILED,
        Phase.APPLIED: Phase.FAILED,
    },
    Event.REMOVE: dict.fromkeys(Phase, Phase.IDLE),
}
"""The phase that follows each event, by the phase before it. After a backward it is :attr:`Form.outcome`."""


@dataclass(frozen=True)
class Form:
    """When and how one update is made, and the names of its remedies in messages.

    *Interleaved*: each bucket is updated as soon as it is reduced, in backward. *Deferred*: all are updated at once, by
    the loop's ``step()``, or if *automatic*, with the last bucket. A loop calls no ``step()`` of automatic updates.
    """

    step: str
    """The loop's call of ``step()``."""
    deferred_code: str
    """How to write the deferred form."""
    edits: str = ""
    """The form whose gradients are the whole mean, and the loop's to edit."""
    clip: str = "ClipGradNorm(max_norm) in the chain"
    """How to clip by the global norm."""
    skip: str = "optimizer.skip_update()"
    """How to run a backward without an update."""
    adds_up: bool = True
    """Whether a second backward before ``step()`` adds up as in plain DDP, since all of ``.grad`` is the mean."""
    is_deferred: bool = False
    is_automatic: bool = False

    @cached_property
    def outcome(self) -> Phase:
        """The phase after backward: ``REDUCED`` if ``step()`` updates, ``APPLIED`` if backward did and the loop calls
        ``step()``, ``STEPPED`` if backward did and it does not."""
        if self.is_automatic:
            return Phase.STEPPED
        return Phase.REDUCED if self.is_deferred else Phase.APPLIED
