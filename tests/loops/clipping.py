"""Gradients clipped by the norm of the whole model, with weight decay for matrices alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from .corpus import limit, loop
from .declared import EDITED, OWN_CLIP
from .forms import CLIPS_AT, CLIPS_ITSELF
from .models import decay_groups
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


@loop("weight-decay groups and clip_grad_norm_", EDITED, model=deep, groups=decay_groups, steps=10)
def clipped_groups(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        if run.form.name not in CLIPS_ITSELF:
            clip_grad_norm_(ddp.parameters(), CLIPS_AT)
        optimizer.step()
        yield loss


@loop(
    "weight-decay groups and a clip with the library's own option",
    OWN_CLIP_OF_GROUPS,
    model=deep,
    groups=decay_groups,
    steps=10,
)
def own_clip_of_groups(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        if run.form.name not in CLIPS_ITSELF:
            clip = getattr(optimizer, "clip_grad_norm_", None)
            clip(CLIPS_AT) if clip else clip_grad_norm_(ddp.parameters(), CLIPS_AT)
        optimizer.step()
        yield loss
