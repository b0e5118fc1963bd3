"""Learning rates that change."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from .corpus import Declaration, loop, refused, variant
from .declared import ALREADY_UPDATED
from .forms import STEPPED
from .run import Run


def _changed(key: str) -> Declaration:
    return [*refused(STEPPED, f"'{key}' of parameter group 0 was changed from "), *ALREADY_UPDATED]


def scheduled(make: Any) -> Any:
    """The usual loop with a scheduler that steps after every step."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        scheduler = make(optimizer)
        for x, y in run.batches():
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
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
    for place, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(place)
        yield loss


@loop("a rate set by hand before the forward")
def warm_up(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (place + 1)
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        yield loss


@loop("a rate set between backward and step()", _changed("lr"))
def rate_after_backward(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (place + 1)
        optimizer.step()
        yield loss


@loop("momentum set between backward and step()", _changed("momentum"))
def momentum_after_backward(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * place
        optimizer.step()
        yield loss
