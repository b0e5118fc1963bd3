"""`OverlappedOptimizer` as an optimizer: its hooks, its copies, and its life after the registration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_loops import ADAMW, BOTH_MODES, SGD, NoScheduler, overlapped_ddp, plain_ddp, renumbered
from torch import nn

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, chain


def _stepped() -> OverlappedOptimizer:
    layer = nn.Linear(2, 2)
    plain = ADAMW(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    return OverlappedOptimizer(plain)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_the_state_and_the_defaults_of_the_original(copied: Callable[[Any], Any]) -> None:
    overlapped = _stepped()
    other = copied(overlapped)
    assert_parity(other.state_dict(), overlapped.state_dict(), what="a copy's state")
    assert other.defaults == overlapped.defaults


def test_repr_names_the_wrapped_optimizer() -> None:
    assert "AdamW" in repr(_stepped())


def _stepped_after_removal(rank: int, world_size: int, deferred: bool, by_wrapped: bool) -> None:
    ddp, overlapped, registration = overlapped_ddp(MLP, SGD, deferred=deferred)
    train(ddp, overlapped, MLP.batches(rank, steps=3), step_fn=overlapped_step)
    registration.remove()
    before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    (overlapped.optimizer if by_wrapped else overlapped).step()
    assert_parity(dict(ddp.module.named_parameters()), before, what="parameters after remove() and step()")


@BOTH_MODES
def test_its_step_after_removal_applies_no_gradient_again(deferred: bool) -> None:
    run_ranks(_stepped_after_removal, 2, deferred, False)


@BOTH_MODES
def test_the_wrapped_optimizers_step_after_removal_applies_no_gradient_again(deferred: bool) -> None:
    run_ranks(_stepped_after_removal, 2, deferred, True)


def _registered_again(rank: int, world_size: int, deferred: bool) -> None:
    batches = MLP.batches(rank, steps=9)
    reference = train(*plain_ddp(MLP, SGD), batches, scheduler=NoScheduler)
    ddp, overlapped, registration = overlapped_ddp(MLP, SGD, deferred=deferred)
    records = train(ddp, overlapped, batches[:3], step_fn=overlapped_step, scheduler=NoScheduler)
    registration.remove()
    overlapped.step()
    records += renumbered(train(ddp, overlapped, batches[3:6], step_fn=plain_step, scheduler=NoScheduler), 3)
    overlapped.zero_grad()
    chain(AllReduce(), Step(overlapped, deferred=not deferred)).register(ddp)
    records += renumbered(train(ddp, overlapped, batches[6:], step_fn=overlapped_step, scheduler=NoScheduler), 6)
    assert_parity(records, reference, what="registered, removed, registered in the other mode")


@BOTH_MODES
def test_training_goes_on_after_removal_and_in_the_other_mode(deferred: bool) -> None:
    run_ranks(_registered_again, 2, deferred)
