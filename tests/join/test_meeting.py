"""A mistake on one rank, where all are about to issue collectives, is an error on all at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    OverlappedOptimizer,
    PeerError,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    register,
)

_TIMEOUT_S = 12


def _zero(ddp: Any, is_wrong: bool) -> Any:
    return ZeroRedundancyOptimizer([] if is_wrong else ddp.parameters(), torch.optim.SGD, lr=0.1)


def _zero_of_no_optimizer(ddp: Any, is_wrong: bool) -> Any:
    cls: Any = torch.nn.Linear if is_wrong else torch.optim.SGD
    return ZeroRedundancyOptimizer(ddp.parameters(), cls, lr=0.1)


def _registration(ddp: Any, is_wrong: bool) -> Any:
    parameters = torch.nn.Linear(2, 2).parameters() if is_wrong else ddp.parameters()
    optimizer = OverlappedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    return chain(AllReduce(), Step(optimizer)).register(ddp)


def _registration_without_reducer(ddp: Any, is_wrong: bool) -> Any:
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    return register(ddp, Step(optimizer) if is_wrong else chain(AllReduce(), Step(optimizer)))


MADE: dict[str, Callable[[Any, bool], Any]] = {
    "ZeRO without parameters": _zero,
    "ZeRO of something else": _zero_of_no_optimizer,
    "a registration of other parameters": _registration,
    "a registration without a reducer": _registration_without_reducer,
}


def _one_is_wrong(rank: int, world_size: int) -> None:
    for make in MADE.values():
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        start_s = time.monotonic()
        with pytest.raises(ConfigurationError if rank == 1 else PeerError, match=None if rank == 1 else "rank 1: "):
            make(ddp, rank == 1)
        assert time.monotonic() - start_s < _TIMEOUT_S / 2
        make(ddp, False)  # And all can go on.
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    zero.step()


def test_a_mistake_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(_one_is_wrong, 2, group_timeout_s=_TIMEOUT_S)


def _does_not_come(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"ranks \[1\] did not come to make a ZeroRedundancyOptimizer"):
            _zero(ddp, False)


def test_a_rank_that_does_not_come_is_named() -> None:
    run_ranks(_does_not_come, 2, group_timeout_s=1)
