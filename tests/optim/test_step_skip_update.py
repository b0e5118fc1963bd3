"""Backwards of another loss through a registered model, and gradients that are there before a forward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from loop_forms import (
    FORMS,
    INTERLEAVED,
    SGD,
    Loop,
    backward,
    check_equal,
    check_refused,
    penalty,
    plain,
    registered,
    settle,
    skipping,
)

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Join, OverlappedOptimizer, Step, TrainingLoopError, chain


def _adversarial(ddp: tuple[Any, Any], optimizers: tuple[Any, Any], rank: int) -> None:
    generator, discriminator = ddp
    for step in range(4):
        noise = MLP.batch(step, rank).inputs[0]
        optimizers[0].zero_grad()
        with skipping(optimizers[1]):
            discriminator(generator(noise)).square().mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (discriminator(generator(noise).detach()) - 1).square().mean().backward()
        optimizers[1].step()


def _gan(rank: int, world_size: int, form: str) -> None:
    reference, ours = ([wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1)] for _ in range(2))
    _adversarial(tuple(reference), tuple(plain(form, ddp.parameters()) for ddp in reference), rank)
    optimizers = [registered(form, ddp) for ddp in ours]
    _adversarial(tuple(ours), tuple(optimizers), rank)
    settle(*optimizers)
    for mine, theirs in zip(ours, reference, strict=True):
        assert_parity(mine.module.state_dict(), theirs.module.state_dict(), what=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_generators_loss_goes_through_the_discriminator(form: str) -> None:
    run_ranks(_gan, 2, form)


def _skipped_then_stepped(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        with skipping(optimizer), skipping(optimizer):
            backward(ddp, step, rank)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def _skipped_then_edited(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        with skipping(optimizer):
            backward(ddp, step, rank)
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
        optimizer.step()


def _discarded(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        with contextlib.suppress(KeyError), skipping(optimizer):
            backward(ddp, 7, rank)
            raise KeyError
        if step % 2:
            optimizer.zero_grad()
        else:
            ddp.zero_grad()
        backward(ddp, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def _added(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        with skipping(optimizer):
            backward(ddp, 7, rank)
        backward(ddp, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def _entered_inside(ddp: Any, optimizer: Any, rank: int) -> None:
    """A backward goes by where it begins: the block is entered with the last bucket's gradient."""
    for step in range(3):
        optimizer.zero_grad()
        loss = ddp(*MLP.batch(step, rank).inputs).square().mean()
        with contextlib.ExitStack() as stack:

            def enter(gradient: torch.Tensor, stack: contextlib.ExitStack = stack) -> None:
                stack.enter_context(skipping(optimizer))

            handle = ddp.module[0].weight.register_hook(enter)
            loss.backward()
            handle.remove()
        optimizer.step()


def _skips(rank: int, world_size: int, form: str) -> None:
    for loop in (_skipped_then_stepped, _discarded, _entered_inside):
        check_equal(form, loop, rank)
    if form.startswith("zero"):
        check_refused(form, _added, rank, "a second backward began before")
        check_refused(form, _skipped_then_edited, rank, "is the mean over ranks only where this rank owns it")
    else:
        check_equal(form, _added, rank)
        check_equal(form, _skipped_then_edited, rank)


@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_update_is_stepped_discarded_or_added_to(form: str) -> None:
    run_ranks(_skips, 2, form)


def _automatic(rank: int, world_size: int) -> None:
    reference, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    theirs, stage = SGD(reference.parameters()), Step(SGD(ddp.parameters()))
    chain(AllReduce(), stage).register(ddp)
    for step in range(4):
        backward(reference, 7, rank)
        with stage.skip_update():
            backward(ddp, 7, rank)
        if step % 2:
            reference.zero_grad()
            ddp.zero_grad()
        backward(reference, step, rank)
        backward(ddp, step, rank)
        theirs.step()
        theirs.zero_grad()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what="automatic")


def _forgotten(ddp: Any, optimizer: Any, rank: int) -> None:
    backward(ddp, 0, rank)
    optimizer.zero_grad()


def _forgotten_too(ddp: Any, optimizer: Any, rank: int) -> None:
    backward(ddp, 0, rank)
    backward(ddp, 1, rank)


def _unregistered(rank: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    with optimizer.skip_update():
        backward(ddp, 0, rank)
    chain(AllReduce(), Step(optimizer)).register(ddp)
    optimizer.zero_grad()
    backward(ddp, 0, rank)
    optimizer.step()


def _under_join(rank: int, form: str, discards: bool) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = registered(form, ddp)
    with Join([ddp, optimizer]):
        for step in range(3 + rank):
            with skipping(optimizer):
                backward(ddp, step, rank)
            if discards:
                optimizer.zero_grad()
            optimizer.step()
    first = [torch.empty_like(ddp.module[0].weight) for _ in range(2)]
    torch.distributed.all_gather(first, ddp.module[0].weight.detach())
    assert torch.equal(*first)


def _edges(rank: int, world_size: int) -> None:
    _automatic(rank, world_size)
    _unregistered(rank)
    for form in INTERLEAVED:
        check_refused(form, _forgotten, rank, r"with (optimizer|zero)\.skip_update\(\):")
        check_refused(form, _forgotten_too, rank, r"with (optimizer|zero)\.skip_update\(\):")
    for form in ("interleaved", "zero deferred"):
        _under_join(rank, form, False)
    with pytest.raises(TrainingLoopError, match="under Join a backward cannot be discarded"):
        _under_join(rank, "interleaved", True)


def test_skip_update_in_automatic_forms_unregistered_and_under_join() -> None:
    run_ranks(_edges, 2)


def _refused_under_join(rank: int, world_size: int) -> None:
    with pytest.raises(TrainingLoopError, match=r"skip_update\(\) under Join.*deferred=True"):
        _under_join(rank, "zero", False)


def test_skip_update_of_an_interleaved_sharded_update_is_refused_under_join() -> None:
    run_ranks(_refused_under_join, 2)


# Gradients that the library has not made.


def _penalty_before(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        settle(optimizer)
        penalty(ddp.module).backward()
        backward(ddp, step, rank)
        optimizer.step()


def _penalty_after(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(ddp, step, rank)
        settle(optimizer)
        penalty(ddp.module).backward()
        optimizer.step()


def _inner_model(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(ddp.module, step, 0)
        backward(ddp, step, rank)
        optimizer.step()


def _two_losses(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        out = ddp(*MLP.batch(step, rank).inputs)
        (out.square().mean() + out.abs().mean()).backward()
        optimizer.step()


def _two_forwards(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, step + 10, rank)
        backward(ddp, step, rank)
        optimizer.step()


def _penalty_without_zero_grad(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        settle(optimizer)
        with ddp.no_sync():
            penalty(ddp.module).backward()
        backward(ddp, step, rank)
        optimizer.step()
        optimizer.zero_grad()


EXISTING: tuple[Loop, ...] = (_penalty_before, _inner_model, _two_losses, _two_forwards, _penalty_without_zero_grad)


def _existing(rank: int, world_size: int, form: str) -> None:
    for loop in EXISTING:
        check_equal(form, loop, rank)
    if form in (*INTERLEAVED, "zero deferred"):
        check_refused(form, _penalty_after, rank, "a second backward began before .* adds to the gradient of 8.bias")
    else:
        check_equal(form, _penalty_after, rank)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_there_before_a_forward_are_kept(form: str) -> None:
    run_ranks(_existing, 2, form)
