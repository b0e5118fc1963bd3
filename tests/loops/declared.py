"""What many loops declare: errors and limits that follow from when a form makes its update."""

from __future__ import annotations

from .corpus import Declaration, limit, refused
from .forms import AUTOMATIC, INTERLEAVED, RELEASED, SHARDED, STAGED, STEPPED

__all__ = [
    "ALREADY_UPDATED",
    "CLIPPED",
    "CLIPPED_PARTS",
    "EDITED",
    "EVERY_BACKWARD",
    "GONE",
    "HOOK_IS_NOT_TOLD",
    "MOVED",
    "NOT_DISCARDED",
    "PARTS",
    "SCALED",
    "SECOND_BACKWARD",
    "undeclared",
]

_AFTER = "backward is the step: what the loop does between backward and step() comes after the update"
_EVERY = "backward is the step: every synchronized backward makes one update, no more and no less"

GONE = limit(RELEASED, "gradients are released in backward: after it there is none to read, clip or change")
"""The loop reads or changes gradients."""

KEEPING = [form for form in STEPPED if form not in RELEASED]

EDITED = [*refused(KEEPING, "the gradient of "), *GONE, *limit(AUTOMATIC, _AFTER)]
"""The loop changes gradients between backward and step()."""

CLIPPED_PARTS = refused(["zero deferred"], "after backward .grad of ")

CLIPPED = [*EDITED, *CLIPPED_PARTS]
"""The loop clips by the norm of what each rank has."""

ALREADY_UPDATED = limit(AUTOMATIC, _AFTER)
"""The loop does something else there, which the forms with a step() take into account."""

EVERY_BACKWARD = limit(AUTOMATIC, _EVERY)
"""The loop makes a backward for which it does not step."""

NOT_DISCARDED = [*refused(STEPPED, "zero_grad() between backward and "), *EVERY_BACKWARD]
"""The loop throws a backward away."""

SECOND_BACKWARD = [
    *refused((*INTERLEAVED, *STAGED), "a second backward began before "),
    *EVERY_BACKWARD,
]
"""The loop makes two synchronized backwards for one step."""


def undeclared(name: str) -> Declaration:
    """The optimizer ``name`` is neither known nor declared, and takes whole steps alone."""
    return refused((*INTERLEAVED, *AUTOMATIC, *SHARDED), f"{name} is neither known nor declared")


PARTS = limit(
    [form for form in STAGED if form not in RELEASED],
    "under ZeroStep a gradient is the mean only where this rank owns it",
)
"""The loop reads gradients, which :data:`GONE` has of those that are released."""

MOVED = [*refused(STEPPED, "0.weight (and "), *ALREADY_UPDATED]
"""The loop changes parameters between backward and step()."""

SCALED = [
    *refused(STEPPED, "GradScaler decides after backward whether to step"),
    *refused(AUTOMATIC, "this SGD is stepped inside backward"),
]
"""The loop is left to GradScaler."""

HOOK_IS_NOT_TOLD = refused(["hook"], "a parameter has no gradient on this rank, and a hook registered with ddp.")
"""A parameter has no gradient."""
