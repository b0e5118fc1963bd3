"""Step hooks of all optimizers beside plain DDP; those of one are in the corpus of loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_loops import SGD, NoScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness import Record, assert_parity, on_ranks, overlapped_step, plain_step, train, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, UnsupportedError, chain

STEPS = 4


def _clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert type(optimizer) is torch.optim.SGD and args == (optimizer,)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


def _decay(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.add_(parameter.detach(), alpha=0.1)


def _trained(rank: int, hook: Callable[[Any], Any], form: str) -> list[Record]:
    """With plain DDP, or with an update in that form."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer: Any = SGD(ddp.parameters())
    if form != "plain":
        optimizer = OverlappedOptimizer(optimizer)
    handle = hook(optimizer)
    if form != "plain":
        chain(AllReduce(), Step(optimizer, deferred="deferred" in form)).register(ddp)
    step = plain_step if form == "plain" else overlapped_step
    records = train(ddp, optimizer, MLP.batches(rank, steps=STEPS), step_fn=step, scheduler=NoScheduler)
    handle.remove()
    return records


HOOKS: dict[str, Callable[[Any], Any]] = {
    "a clamp as global post-hook": lambda optimizer: register_optimizer_step_post_hook(_clamp),
    "a penalty as global pre-hook": lambda optimizer: register_optimizer_step_pre_hook(_decay),
}


@on_ranks(2)
def test_step_hooks_do_what_they_do_beside_plain_ddp_in_every_form_that_takes_them(rank: int, world_size: int) -> None:
    for name, hook in HOOKS.items():
        reference = _trained(rank, hook, "plain")
        for form in ("interleaved", "deferred") if "post-hook" in name else ("deferred",):
            assert_parity(_trained(rank, hook, form), reference, what=f"{name}, {form}")


@on_ranks(2)
def test_pre_hooks_are_refused_where_the_update_is_made_before_they_could_run(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    optimizer = SGD(ddp.parameters())
    handle = register_optimizer_step_pre_hook(_decay)
    for made in (Step(optimizer), Step(OverlappedOptimizer(optimizer))):
        with pytest.raises(UnsupportedError, match=r"the step pre-hook _decay must run before .*deferred=True"):
            chain(AllReduce(), made).register(ddp)
    handle.remove()
