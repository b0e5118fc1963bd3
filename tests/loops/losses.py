"""Losses of several models or several backwards: adversarial, actor-critic, penalties."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.nn.functional import mse_loss

from .corpus import limit, loop, refused, variant
from .declared import ADDED_TO, NOT_DISCARDED
from .models import mlp
from .plain import applied, touched, trained
from .run import Run

_ADAM = partial(optim.Adam, lr=0.01, betas=(0.5, 0.9))

FOLLOWED = refused(["chained", "zero chained"], "skip_update() leaves the update of ")
"""The chain has a transform after the update."""

DISCARDED_LATER = [
    *[cell for cell in NOT_DISCARDED if cell[0] != "hook"],
    *refused(["hook"], "a second backward began before the next forward"),
]
"""The loop makes a backward that it throws away, after one that was applied, or before one that is."""

NO_SKIP = limit(["hook"], "a hook has no skip_update()")


def _second(run: Run) -> tuple[Any, Any]:
    """Another DDP model with an optimizer of the same form."""
    ddp = run.wrap(mlp())
    return ddp, run.optimizer(ddp)


def gan(*, says_so: bool) -> Any:
    """A GAN whose generator's loss goes through the discriminator's DDP model."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        generator, generates = ddp, optimizer
        critic, criticizes = _second(run)
        for x, y in run.batches():
            criticizes.zero_grad()
            with torch.no_grad():
                fake = generator(x)
            loss_d = applied(criticizes, critic(fake).mean() - critic(y).mean())
            generates.zero_grad()
            loss_g = -critic(generator(x)).mean()
            with run.skip(criticizes) if says_so else nullcontext():
                loss_g.backward()
            generates.step()
            yield loss_d, loss_g

    return body


loop("GAN", DISCARDED_LATER, optimizer=_ADAM)(gan(says_so=False))
loop("GAN, with skip_update()", NO_SKIP, FOLLOWED, optimizer=_ADAM)(gan(says_so=True))


@loop("actor and critic, one loss, two optimizers")
def actor_critic(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    critic, values = _second(run)
    for x, y in run.batches():
        optimizer.zero_grad()
        values.zero_grad()
        loss = applied(optimizer, mse_loss(ddp(x), y) + mse_loss(critic(x), y))
        values.step()
        yield loss


@loop("actor and critic, two losses, the actor's through the critic", DISCARDED_LATER)
def actor_through_critic(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    critic, values = _second(run)
    for x, y in run.batches():
        loss_v = trained(critic, values, x, y)
        optimizer.zero_grad()
        loss_a = applied(optimizer, -critic(ddp(x)).mean())
        values.zero_grad()
        yield loss_v, loss_a


def adversarial(*, says_so: bool) -> Any:
    """A first backward is for the gradient of the inputs alone."""

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        for x, y in run.batches():
            x.requires_grad_()
            with run.skip(optimizer) if says_so else nullcontext():
                mse_loss(ddp(x), y).backward()
            attacked = (x + 0.1 * x.grad.sign()).detach()
            loss = trained(ddp, optimizer, attacked, y)
            yield loss

    return body


loop("adversarial examples: a backward for the inputs' gradient", DISCARDED_LATER)(adversarial(says_so=False))
loop("adversarial examples, with skip_update()", NO_SKIP, FOLLOWED)(adversarial(says_so=True))


@loop("gradient penalty: double backward through the inputs")
def gradient_penalty(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        x.requires_grad_()
        optimizer.zero_grad()
        out = ddp(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = applied(optimizer, mse_loss(out, y) + 0.1 * slope.square().mean())
        yield loss


@loop("a look ahead by functional_call")
def look_ahead(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        optimizer.zero_grad()
        named = dict(ddp.module.named_parameters())
        slopes = torch.autograd.grad(mse_loss(ddp.module(x), y), list(named.values()))
        ahead = {name: value.detach() - 0.1 * slope for (name, value), slope in zip(named.items(), slopes, strict=True)}
        with torch.no_grad():
            seen = torch.func.functional_call(ddp.module, ahead, (x,))
        loss = applied(optimizer, mse_loss(ddp(x), y + 0.1 * seen))
        yield loss


def _regularize(run: Run, ddp: Any, optimizer: Any) -> None:
    run.settle(optimizer)
    (0.01 * sum(parameter.square().sum() for parameter in ddp.parameters())).backward()


def _module_backward(run: Run, ddp: Any, optimizer: Any) -> None:
    """With the same inputs on every rank, so that replicas stay equal in plain DDP."""
    ddp.module(torch.ones(2, 16)).square().mean().backward()


variant(touched(before_forward=_regularize), "a regularizer with its own backward, before the forward")
variant(touched(before_step=_regularize), "a regularizer with its own backward, after the loss's", ADDED_TO)
variant(touched(before_forward=_module_backward), "a backward of ddp.module before the forward")
