"""Two models of one layout that ranks register in different orders are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, CollectiveError, chain


def _two(values: tuple[float, float]) -> list[Any]:
    models = [wrap(MLP.model(), **MLP.ddp_options()) for _ in values]
    with torch.no_grad():
        for model, value in zip(models, values, strict=True):
            for parameter in model.parameters():
                parameter.mul_(value)
    return models


def _swapped(rank: int, world_size: int) -> None:
    models = _two((1.0, 2.0))
    first, second = models if rank != 1 else reversed(models)
    chain(AllReduce()).register(first)
    with pytest.raises(CollectiveError, match=r"rank 1 registers as number 2 of .* that rank 0 registers as number 1"):
        chain(AllReduce()).register(second)


def test_another_order_on_one_rank_is_an_error_that_names_it() -> None:
    run_ranks(_swapped, 3)


def _in_order(rank: int, world_size: int) -> None:
    # Different models; equal ones; models that ranks have trained apart, registered a second time; and equal again.
    for values in ((1.0, 2.0), (1.0, 1.0), (1.0 + rank, 3.0 + rank)):
        models = _two(values)
        for _ in range(2):
            registrations = [chain(AllReduce()).register(model) for model in models]
            for registration in registrations:
                registration.remove()


def test_models_in_the_same_order_are_registered_whatever_their_values() -> None:
    run_ranks(_in_order, 2)
