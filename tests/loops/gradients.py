"""Gradients that are clipped, changed or logged between backward and step()."""

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.third_party import clip_gradients

from .corpus import Declaration, refused, variant
from .declared import ALREADY_UPDATED, EDITED, MOVED, OWN_CLIP, READ, REPLACED
from .forms import STEPPED
from .models import ADAMW
from .plain import Touch, own_clip, touched
from .run import Run


def _clip(max_norm: float, **options: Any) -> Touch:
    return lambda run, ddp, optimizer: clip_grad_norm_(ddp.parameters(), max_norm, **options)


def _scale_data(run: Run, ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad.data.mul_(0.5)


def _clip_each(run: Run, ddp: Any, optimizer: Any) -> Any:
    norms = []
    for parameter in ddp.parameters():
        norms.append(parameter.grad.data.norm(2))
        scale = 0.05 / (norms[-1] + 1e-6)
        if scale < 1:
            parameter.grad.data.mul_(scale)
    return norms


def _replace(run: Run, ddp: Any, optimizer: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad = parameter.grad * 0.5


def _add_noise(run: Run, ddp: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter))


def _decay_by_hand(run: Run, ddp: Any, optimizer: Any) -> None:
    run.settle(optimizer)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(0.99)


def _log(run: Run, ddp: Any, optimizer: Any) -> Any:
    return [parameter.grad.norm() for parameter in ddp.parameters()], [p.grad.abs().max() for p in ddp.parameters()]


def _total_norm(run: Run, ddp: Any, optimizer: Any) -> Any:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in ddp.parameters()])


def _zero_one(run: Run, ddp: Any, optimizer: Any) -> None:
    next(iter(ddp.parameters())).grad = None


def _add(name: str, touch: Touch, *declared: Declaration, **options: Any) -> None:
    variant(touched(before_step=touch), name, *declared, **options)


_VIEWS = {"gradient_as_bucket_view": True}

_add("clip_grad_norm_ that binds", _clip(0.05), EDITED)
_add("clip_grad_norm_ with the largest element", _clip(0.05, norm_type=float("inf")), EDITED, optimizer=ADAMW)
_add("clip_grad_norm_(inf), to log the norm", _clip(float("inf")), EDITED)
_add("clip_grad_norm_ that does not bind", _clip(1e6), EDITED, optimizer=ADAMW)
_add("a clip by hand", lambda run, ddp, optimizer: clip_gradients(list(ddp.parameters()), 0.05), EDITED)
_add("clip_grad_value_", lambda run, ddp, optimizer: clip_grad_value_(ddp.parameters(), 0.01), EDITED)
_add("p.grad.data.mul_()", _scale_data, EDITED)
_add("each gradient clipped by its own norm", _clip_each, EDITED)
_add("p.grad = p.grad * 0.5", _replace, REPLACED)
_add("gradient noise", _add_noise, EDITED)
_add("weight decay by hand, between backward and step()", _decay_by_hand, MOVED)
_add("gradient norms logged", _log, READ)
_add("get_total_norm, to log the norm", _total_norm, READ)
_add("one gradient set to None", _zero_one, refused(STEPPED, "the gradient of "), ALREADY_UPDATED)
_add("clip_grad_norm_, gradients as bucket views", _clip(0.05), EDITED, ddp=_VIEWS)
_add("a clip with the library's own option", own_clip, OWN_CLIP, optimizer=ADAMW, steps=3)
