"""The loop as tutorials write it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from .corpus import limit, loop, refused
from .forms import ALL, CLIPS_AT
from .run import Run

Touch = Callable[[Run, Any, Any], Any]


def applied(optimizer: Any, loss: Any) -> Any:
    loss.backward()
    optimizer.step()
    return loss


def trained(ddp: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """One step of :func:`usual`, in loops that are about something else."""
    optimizer.zero_grad()
    return applied(optimizer, mse_loss(ddp(x), y))


@loop("the usual loop")
def usual(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        yield loss


def touched(*, before_forward: Touch | None = None, before_step: Touch | None = None) -> Any:
    """The usual loop with something before the forward, or between backward and step()."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        for x, y in run.batches():
            optimizer.zero_grad()
            seen = before_forward and before_forward(run, ddp, optimizer)
            loss = mse_loss(ddp(x), y)
            loss.backward()
            noted = before_step and before_step(run, ddp, optimizer)
            optimizer.step()
            yield loss, seen, noted

    return body


def own_clip(run: Run, ddp: Any, optimizer: Any) -> Any:
    """Of the form's optimizer, where it has one."""
    clip = getattr(optimizer, "clip_grad_norm_", None)
    return clip(CLIPS_AT) if clip else clip_grad_norm_(ddp.parameters(), CLIPS_AT)


@loop("zero_grad() after step()")
def zero_grad_after(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        loss = applied(optimizer, mse_loss(ddp(x), y))
        optimizer.zero_grad()
        yield loss


@loop("zero_grad(set_to_none=False)")
def zero_grad_to_zero(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad(set_to_none=False)
        loss = applied(optimizer, mse_loss(ddp(x), y))
        yield loss


@loop("ddp.zero_grad()")
def zero_grad_of_model(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        ddp.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x), y))
        yield loss


@loop("without zero_grad(), as the README writes it")
def no_zero_grad(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        if run.is_plain or run.form.name in ("hook", "zero alone", "local"):
            optimizer.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x), y))
        yield loss


@loop(
    "no zero_grad() at all, in plain DDP, too",
    limit(
        [form for form in ALL if form not in ("hook", "zero alone", "local")],
        "gradients are cleared, and plain DDP's add up",
    ),
    refused(["hook"], "a second backward began before the next forward"),
)
def adds_up_for_ever(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        loss = applied(optimizer, mse_loss(ddp(x), y))
        yield loss


@loop("step(closure)")
def closure(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():

        def evaluate(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            loss.backward()
            return loss

        yield optimizer.step(evaluate)


@loop("epochs with a short last batch")
def epochs(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for _ in range(2):
        batches = list(run.batches(2))
        batches.append(tuple(tensor[:1] for tensor in batches[-1]))
        for x, y in batches:
            loss = trained(ddp, optimizer, x, y)
            yield loss


@loop("evaluation between steps")
def evaluation(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        ddp.train()
        loss = trained(ddp, optimizer, x, y)
        ddp.eval()
        with torch.no_grad():
            yield loss, ddp(x), ddp.module(x)


@loop("an evaluation forward with grad, without a backward")
def evaluation_with_grad(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        ddp.eval()
        seen = mse_loss(ddp(-x), y)
        ddp.train()
        loss = trained(ddp, optimizer, x, y)
        yield loss, seen


@loop("mixup, drawn in the loop")
def mixup(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        part, order = torch.distributions.Beta(0.8, 0.8).sample(), torch.randperm(len(x))
        optimizer.zero_grad()
        out = ddp(part * x + (1 - part) * x[order])
        loss = applied(optimizer, part * mse_loss(out, y) + (1 - part) * mse_loss(out, y[order]))
        yield loss


@loop("a skipped batch: continue before backward")
def skips_forward(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        if place % 3 == 1:
            continue
        loss.backward()
        optimizer.step()
        yield loss
