"""Gradients that are clipped, changed or logged between backward and step()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.third_party import clip_gradients

from .corpus import loop, refused, variant
from .declared import ALREADY_UPDATED, EDITED, MOVED, OWN_CLIP, READ, REPLACED
from .forms import IN_BACKWARD, STEPPED
from .run import Run

_ADAMW = partial(optim.AdamW, lr=0.01)


def after_backward(touch: Callable[[Any, Any], Any]) -> Any:
    """The usual loop that calls ``touch(ddp, optimizer)`` between backward and step()."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        for x, y in run.batches():
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            loss.backward()
            seen = touch(ddp, optimizer)
            optimizer.step()
            yield loss, seen

    return body


def _clip(max_norm: float, **options: Any) -> Callable[[Any, Any], Any]:
    return lambda ddp, optimizer: clip_grad_norm_(ddp.parameters(), max_norm, **options)


def _clip_quietly(ddp: Any, optimizer: Any) -> None:
    clip_grad_norm_(ddp.parameters(), 1e6)


def _scale_data(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad.data.mul_(0.5)


def _clip_each(ddp: Any, optimizer: Any) -> Any:
    norms = []
    for parameter in ddp.parameters():
        norms.append(parameter.grad.data.norm(2))
        scale = 0.05 / (norms[-1] + 1e-6)
        if scale < 1:
            parameter.grad.data.mul_(scale)
    return norms


def _replace(ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad = parameter.grad * 0.5


def _add_noise(ddp: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter))


def _settle(optimizer: Any) -> None:
    if hasattr(optimizer, "wait"):
        optimizer.wait()


def _decay_by_hand(ddp: Any, optimizer: Any) -> None:
    _settle(optimizer)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(0.99)


def _log(ddp: Any, optimizer: Any) -> Any:
    return [parameter.grad.norm() for parameter in ddp.parameters()], [p.grad.abs().max() for p in ddp.parameters()]


def _total_norm(ddp: Any, optimizer: Any) -> Any:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in ddp.parameters()])


def _zero_one(ddp: Any, optimizer: Any) -> None:
    next(iter(ddp.parameters())).grad = None


variant(after_backward(_clip(0.05)), "clip_grad_norm_ that binds", EDITED)
variant(
    after_backward(_clip(0.05, norm_type=float("inf"))),
    "clip_grad_norm_ with the largest element",
    EDITED,
    optimizer=_ADAMW,
)
variant(after_backward(_clip(float("inf"))), "clip_grad_norm_(inf), to log the norm", EDITED)
variant(after_backward(_clip_quietly), "clip_grad_norm_ that does not bind", EDITED, optimizer=_ADAMW)
variant(after_backward(lambda ddp, optimizer: clip_gradients(list(ddp.parameters()), 0.05)), "a clip by hand", EDITED)
variant(after_backward(lambda ddp, optimizer: clip_grad_value_(ddp.parameters(), 0.01)), "clip_grad_value_", EDITED)
variant(after_backward(_scale_data), "p.grad.data.mul_()", EDITED)
variant(
    after_backward(_clip_each),
    "each gradient clipped by its own norm",
    refused([*IN_BACKWARD, "zero deferred"], "the gradient of "),
)
variant(after_backward(_replace), "p.grad = p.grad * 0.5", REPLACED)
variant(after_backward(_add_noise), "gradient noise", EDITED)
variant(after_backward(_decay_by_hand), "weight decay by hand, between backward and step()", MOVED)
variant(after_backward(_log), "gradient norms logged", READ)
variant(after_backward(_total_norm), "get_total_norm, to log the norm", READ)
variant(after_backward(_zero_one), "one gradient set to None", refused(STEPPED, "the gradient of "), ALREADY_UPDATED)
variant(
    after_backward(_clip(0.05)),
    "clip_grad_norm_, gradients as bucket views",
    EDITED,
    ddp={"gradient_as_bucket_view": True},
)


@loop("a clip with the library's own option", OWN_CLIP, optimizer=_ADAMW, steps=3)
def own_clip(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            norm = optimizer.clip_grad_norm_(0.05)
        else:
            norm = clip_grad_norm_(ddp.parameters(), 0.05)
        optimizer.step()
        yield loss, norm
