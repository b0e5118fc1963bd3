"""Gradients clipped by the norm of the whole model, with weight decay for matrices alone."""

from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_

from .corpus import limit, variant
from .declared import EDITED, OWN_CLIP
from .forms import CLIPS_AT, CLIPS_ITSELF
from .models import decay_groups
from .plain import own_clip, touched
from .run import Run

# Races, since in few steps the last bit of the norm may be the same.
OWN_CLIP_OF_GROUPS = [
    *[cell for cell in OWN_CLIP if cell[0] != "zero deferred"],
    *limit(["zero deferred"], "the ranks' parts of the norm are summed in another order", is_a_race=True),
    *limit(
        ["zero alone"],
        "without a stage a ZeRO optimizer knows no model, and sums the norm in the order of its groups",
        is_a_race=True,
    ),
]


def deep() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())])


def _clip(run: Run, ddp: Any, optimizer: Any) -> None:
    if run.form.name not in CLIPS_ITSELF:
        clip_grad_norm_(ddp.parameters(), CLIPS_AT)


def _own_clip(run: Run, ddp: Any, optimizer: Any) -> None:
    if run.form.name not in CLIPS_ITSELF:
        own_clip(run, ddp, optimizer)


_DEEP: dict[str, Any] = {"model": deep, "groups": decay_groups, "steps": 5}

variant(touched(before_step=_clip), "weight-decay groups and clip_grad_norm_", EDITED, **_DEEP)
variant(
    touched(before_step=_own_clip),
    "weight-decay groups and a clip with the library's own option",
    OWN_CLIP_OF_GROUPS,
    **_DEEP,
)
