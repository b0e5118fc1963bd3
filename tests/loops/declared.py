"""What many loops declare: errors and limits that follow from when a form makes its update."""

from .corpus import Declaration, limit, refused
from .forms import AUTOMATIC, IN_BACKWARD, INTERLEAVED, SHARDED, STAGED, STEPPED, ZERO_INTERLEAVED

_AFTER = "backward is the step: what the loop does between backward and step() comes after the update"
_EVERY = "backward is the step: every synchronized backward makes one update, no more and no less"

READ = refused([*STAGED, "released"], "the gradient of ")
"""The loop reads gradients, which were released, or of which this rank has only a part."""

EDITED = refused([*IN_BACKWARD, "zero deferred"], "the gradient of ")
"""The loop changes gradients between backward and step()."""

REPLACED = [*refused([*STEPPED, "zero deferred"], "the gradient of "), *limit(AUTOMATIC, _AFTER)]
"""The loop reads gradients and puts others into ``.grad``."""

ALREADY_UPDATED = limit(AUTOMATIC, _AFTER)
"""The loop does something else there, which the forms with a step() take into account."""

OWN_CLIP = [
    *refused([*INTERLEAVED, *AUTOMATIC], "the gradient of "),
    *refused(ZERO_INTERLEAVED, "zero.clip_grad_norm_() after backward, but"),
    *limit(["zero deferred"], "the ranks' parts of the norm are summed in another order"),
]
"""The loop calls ``zero.clip_grad_norm_``, or clips by itself where there is none."""

EVERY_BACKWARD = limit(AUTOMATIC, _EVERY)
"""The loop makes a backward for which it does not step."""

NOT_DISCARDED = [*refused(STEPPED, "zero_grad() between backward and "), *EVERY_BACKWARD]
"""The loop throws a backward away."""

ADDED_TO = [
    *refused((*STEPPED, "hook"), "a second backward began before "),
    *refused(["automatic"], "a second backward began before the next forward"),
    *refused(["zero deferred"], "a second backward began before "),
]
"""The loop adds to gradients by a backward of its own."""

SECOND_BACKWARD = [
    *refused((*INTERLEAVED, *STAGED, "hook"), "a second backward began before "),
    *limit(["automatic"], _EVERY),
]
"""The loop makes two synchronized backwards for one step."""


def undeclared(name: str) -> Declaration:
    """The optimizer ``name`` is neither known nor declared, and takes whole steps alone."""
    return refused((*INTERLEAVED, *AUTOMATIC, *SHARDED), f"{name} is neither known nor declared")


MOVED = [*refused(STEPPED, "0.weight (and "), *ALREADY_UPDATED]
"""The loop changes parameters between backward and step()."""

SCALED = [
    *refused(STEPPED, "GradScaler decides after backward whether to step"),
    *refused(AUTOMATIC, "GradScaler decides after backward whether to step"),
]
"""The loop is left to GradScaler."""

HOOK_IS_NOT_TOLD = refused(["hook"], "a parameter has no gradient on this rank, and a hook registered with ddp.")
"""A parameter has no gradient."""
