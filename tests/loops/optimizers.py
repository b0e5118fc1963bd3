"""Optimizers: PyTorch's, and those that users bring."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.nn.functional import mse_loss

from harness.third_party import (
    LAMB,
    SAM,
    SGLD,
    BlockwiseAdamW,
    ClippedLAMB,
    CountingSGD,
    DelegatingOptimizer,
    Lion,
    Lookahead,
    Prodigy,
    PropertyWrapper,
    patch_step,
)

from .corpus import limit, loop, refused, variant
from .declared import NOT_DISCARDED, undeclared
from .forms import ALL, AUTOMATIC, IN_BACKWARD, INTERLEAVED, STAGED, ZERO_INTERLEAVED
from .plain import closure, usual
from .run import Run


class SlowSGD(Lookahead):
    """Lookahead around SGD, as one class."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(optim.SGD(params, lr=lr, momentum=0.9))


class DelegatedAdamW(DelegatingOptimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(optim.AdamW(params, lr=lr))


class WrappedAdamW(PropertyWrapper):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(optim.AdamW(params, lr=lr))


def _clamped(optimizer: Any) -> Any:
    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)
    return optimizer


DELEGATES = [*undeclared("DelegatedAdamW"), *refused(["local"], "DelegatedAdamW runs no step hooks")]
READS_BEFORE_STEP = limit(IN_BACKWARD, "it reads weights before the inner step(), when they are the new ones already")
PATCHED = [
    *refused([*INTERLEAVED, *AUTOMATIC], "step() of this SGD was replaced on the object"),
    *refused(ZERO_INTERLEAVED, "0.weight (and "),
]
CLIPS = [
    *refused(
        [*INTERLEAVED, *AUTOMATIC],
        "the step pre-hook clipping_hook.<locals>.clip must run before the update",
    ),
    *refused([*ZERO_INTERLEAVED, "zero deferred"], "the gradient of "),
]

variant(
    usual,
    "SGD, foreach, Nesterov",
    optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
)
variant(usual, "SGD, fused, maximize", optimizer=partial(optim.SGD, lr=0.01, momentum=0.9, fused=True, maximize=True))
variant(usual, "Adam, foreach, amsgrad", optimizer=partial(optim.Adam, lr=0.01, amsgrad=True, foreach=True))
variant(usual, "AdamW, fused", optimizer=partial(optim.AdamW, lr=0.01, fused=True))
variant(usual, "AdamW, lr a tensor", optimizer=partial(optim.AdamW, lr=torch.tensor(0.01)))
variant(usual, "Adafactor", optimizer=partial(optim.Adafactor, lr=0.01))

variant(usual, "Lion", optimizer=partial(Lion, lr=0.01, weight_decay=0.1))
variant(usual, "blockwise 8-bit AdamW", optimizer=partial(BlockwiseAdamW, lr=0.01))
variant(usual, "LAMB", optimizer=partial(LAMB, lr=0.01))
variant(usual, "LAMB with a global norm", undeclared("ClippedLAMB"), optimizer=partial(ClippedLAMB, lr=0.01))
variant(usual, "Prodigy", undeclared("Prodigy"), optimizer=partial(Prodigy, d0=1e-2))
variant(usual, "SGLD: noise drawn in step()", undeclared("SGLD"), optimizer=partial(SGLD, lr=0.1))
variant(usual, "a step counter in an object", undeclared("CountingSGD"), optimizer=partial(CountingSGD, lr=0.1))
variant(usual, "Lookahead, inside", undeclared("SlowSGD"), optimizer=partial(SlowSGD))
variant(usual, "Lookahead, outside", READS_BEFORE_STEP, optimizer=partial(optim.SGD, lr=0.1), outer=Lookahead)
variant(usual, "a delegating wrapper, inside", DELEGATES, optimizer=partial(DelegatedAdamW))
variant(usual, "a delegating wrapper, outside", optimizer=partial(optim.AdamW, lr=0.01), outer=DelegatingOptimizer)
variant(usual, "a wrapper whose step is a property", undeclared("WrappedAdamW"), optimizer=partial(WrappedAdamW))
variant(usual, "step patched on the instance", PATCHED, optimizer=partial(optim.SGD, lr=0.1), prepare=patch_step)


@loop("SAM", undeclared("SAM"), optimizer=partial(SAM, base=optim.SGD, lr=0.1))
def sam(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        mse_loss(ddp(x), y).backward()
        optimizer.second_step()
        yield loss


@loop(
    "SAM, outside",
    [cell for cell in NOT_DISCARDED if cell[0] not in STAGED],
    refused(STAGED, "the gradient of "),
    optimizer=partial(optim.SGD, lr=0.1),
)
def sam_by_hand(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        with torch.no_grad():
            climbs = [(p, 0.05 * p.grad) for p in ddp.parameters()]
            for parameter, climb in climbs:
                parameter.add_(climb)
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        with torch.no_grad():
            for parameter, climb in climbs:
                parameter.sub_(climb)
        optimizer.step()
        yield loss


variant(closure, "LBFGS", refused(ALL, "LBFGS "), optimizer=partial(optim.LBFGS, lr=0.1, max_iter=2))
variant(usual, "a step post-hook that clamps weights", prepare=_clamped)


@loop("a step pre-hook that clips", CLIPS)
def clipping_hook(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in ddp.parameters():
            parameter.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clip)
    yield from usual(ddp, optimizer, run)
