"""Which optimizers can update in backward: torch's, other libraries', and those that are sent to another mode."""

from __future__ import annotations

import functools

import pytest
import torch
from step_loops import BOTH_MODES, SGD, Lion, Make, overlapped_ddp, plain_ddp
from torch import nn

from harness import assert_parity, overlapped_step, run_ranks, train
from harness.models import MLP
from overlap import ConfigurationError, OverlappedOptimizer, Step, UnsupportedError

OPTIMIZERS: dict[str, Make] = {
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.01, t0=2),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.1),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "RMSprop, centered": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "AdamW, maximize": functools.partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "Adagrad, decay": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "Lion": Lion,
}


def _parity(rank: int, world_size: int, name: str, deferred: bool) -> None:
    make, batches = OPTIMIZERS[name], MLP.batches(rank, steps=6)
    reference = train(*plain_ddp(MLP, make), batches)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=deferred)
    assert_parity(train(ddp, overlapped, batches, step_fn=overlapped_step), reference, what=name)


@BOTH_MODES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_the_optimizers_own_step(name: str, deferred: bool) -> None:
    run_ranks(_parity, 2, name, deferred)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the model again"):
        Step(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))


def test_an_optimizer_for_sparse_gradients_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="SparseAdam works on sparse"):
        OverlappedOptimizer(torch.optim.SparseAdam(nn.Linear(2, 2).parameters()))


def test_what_is_not_an_optimizer_is_refused_by_value() -> None:
    with pytest.raises(ConfigurationError, match=r"expected a torch\.optim\.Optimizer, got str; make one"):
        OverlappedOptimizer("adam")  # type: ignore[arg-type]


def test_an_overlapped_optimizer_is_not_wrapped_again() -> None:
    overlapped = OverlappedOptimizer(SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ConfigurationError, match="already"):
        OverlappedOptimizer(overlapped)
