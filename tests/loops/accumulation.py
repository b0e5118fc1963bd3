"""Several backwards for one step, and backwards without one."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch.nn.functional import mse_loss

from .corpus import loop, refused
from .declared import EVERY_BACKWARD, NOT_DISCARDED, READ, SECOND_BACKWARD
from .forms import INTERLEAVED, STAGED
from .models import ADAMW
from .plain import applied, trained
from .run import Run

ONCE = [
    *refused([*INTERLEAVED, "deferred"], "optimizer.step() was called again for a backward"),
    *refused(STAGED, "zero.step() was called again for a backward"),
    *EVERY_BACKWARD,
]


@loop("accumulation under no_sync() with a leftover batch", steps=5)
def leftover(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        is_last = place % 3 == 2 or place == 4
        with nullcontext() if is_last else ddp.no_sync():
            loss = mse_loss(ddp(x), y) / 3
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


@loop("accumulation by ddp.require_backward_grad_sync", steps=4)
def grad_sync(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        ddp.require_backward_grad_sync = place % 2 == 1
        loss = mse_loss(ddp(x), y) / 2
        loss.backward()
        if place % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


@loop("accumulation where no_sync() holds the backward alone", SECOND_BACKWARD, steps=4)
def forward_outside(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        loss = mse_loss(ddp(x), y) / 2
        with nullcontext() if place % 2 == 1 else ddp.no_sync():
            loss.backward()
        if place % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


@loop("accumulation under no_sync() after an evaluation forward with grad", SECOND_BACKWARD, steps=4)
def stray_forward(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        seen = ddp(-x).mean() if place % 2 == 0 else None
        with nullcontext() if place % 2 == 1 else ddp.no_sync():
            loss = mse_loss(ddp(x), y) / 2
            loss.backward()
        if place % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        yield loss, seen


@loop("accumulation without no_sync()", SECOND_BACKWARD, steps=6)
def accumulation(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        loss = mse_loss(ddp(x), y) / 2
        loss.backward()
        if place % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


@loop("two losses, two backwards, one step()", SECOND_BACKWARD)
def two_backwards(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        first = mse_loss(ddp(x), y)
        first.backward()
        second = ddp(2 * x).square().mean()
        second.backward()
        optimizer.step()
        yield first, second


@loop("two forwards, one backward")
def two_forwards(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x), y) + mse_loss(ddp(-x), y))
        yield loss


@loop("two step() for one backward", ONCE, optimizer=ADAMW)
def steps_twice(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        loss = trained(ddp, optimizer, x, y)
        optimizer.step()
        yield loss


@loop("a skipped batch: zero_grad() after backward", NOT_DISCARDED)
def skips_backward(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        loss = mse_loss(ddp(x), y)
        loss.backward()
        if place % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
        yield loss


@loop("a skipped batch: continue between backward and step()", NOT_DISCARDED, steps=5)
def continues(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        if place % 3 == 1:
            continue
        optimizer.step()
        yield loss


@loop(
    "a step skipped where a gradient is not finite",
    [cell for cell in NOT_DISCARDED if cell[0] not in (*STAGED, "released")],
    READ,
)
def skips_non_finite(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y) * (float("nan") if place == 1 else 1.0)
        loss.backward()
        if all(bool(parameter.grad.isfinite().all()) for parameter in ddp.parameters()):
            optimizer.step()
        yield loss
