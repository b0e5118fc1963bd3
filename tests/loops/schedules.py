"""Learning rates that change."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from .corpus import Declaration, loop, refused, variant
from .declared import ALREADY_UPDATED
from .forms import STEPPED
from .plain import touched, usual
from .run import Run


def _changed(key: str) -> Declaration:
    return [*refused(STEPPED, f"'{key}' of parameter group 0 was changed from "), *ALREADY_UPDATED]


def scheduled(make: Any) -> Any:
    """The usual loop with a scheduler that steps after every step."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        scheduler = make(optimizer)
        for loss in usual(ddp, optimizer, run):
            scheduler.step()
            yield loss, scheduler.get_last_lr()

    return body


variant(scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)), "LambdaLR")
variant(
    scheduled(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6)), "OneCycleLR, which cycles momentum, too"
)
variant(scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2)), "CosineAnnealingWarmRestarts")
variant(
    scheduled(lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
    "StepLR with lr a tensor, foreach",
    optimizer=partial(torch.optim.SGD, lr=torch.tensor(0.1), momentum=0.9, foreach=False),
)


@loop("ReduceLROnPlateau")
def plateau(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for place, loss in enumerate(usual(ddp, optimizer, run)):
        scheduler.step(place)
        yield loss


def _set_rate(run: Run, ddp: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (run.place + 1)


def _set_momentum(run: Run, ddp: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * run.place


variant(touched(before_forward=_set_rate), "a rate set by hand before the forward")
variant(touched(before_step=_set_rate), "a rate set between backward and step()", _changed("lr"))
variant(touched(before_step=_set_momentum), "momentum set between backward and step()", _changed("momentum"))
