"""Which optimizers can update in backward: torch's, other libraries', and those that are sent to another mode."""

from __future__ import annotations

import pytest
import torch
from step_loops import SGD
from torch import nn

from overlap import ConfigurationError, OverlappedOptimizer, Step, UnsupportedError


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
