"""The forms of the sharded update."""

from typing import Any

from overlap import ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero import exchange

# The weights of these models then travel by themselves, their biases packed, and the parts of a gather are smaller than
# a bucket.
exchange._LARGE_NUMEL = 50
exchange._LEAST_BYTES = 64

ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
# How the update is made: the arguments of the stage, None for no stage at all.
FORMS: dict[str, dict[str, Any] | None] = {
    "interleaved": {},
    "interleaved, gather in forward": {"gather": "forward"},
    "deferred": {"deferred": True},
    "deferred, gather in forward": {"deferred": True, "gather": "forward"},
    "automatic": {"automatic": True},
    "automatic, deferred": {"automatic": True, "deferred": True},
    "alone": None,
}


def register(form: str, ddp: Any, zero: ZeroRedundancyOptimizer) -> None:
    """Let a stage of this form, if any, update `zero` in `ddp`'s backward."""
    options = FORMS[form]
    if options is not None:
        chain(ZeroStep(zero, **options)).register(ddp)
