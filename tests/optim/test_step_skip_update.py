"""Backwards of another loss through a registered model, and gradients that are there before a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_forms import (
    INTERLEAVED,
    SGD,
    backward,
    check_refused,
    registered,
    skipping,
)

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Join, OverlappedOptimizer, Step, TrainingLoopError, chain


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
