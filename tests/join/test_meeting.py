"""A mistake on one rank, where all are about to issue collectives, is an error on all at once."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import RankDied, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    Join,
    OverlappedOptimizer,
    PeerError,
    Step,
    TrainState,
    ZeroRedundancyOptimizer,
    ZeroStep,
    auto,
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


def _purposes(ddp: Any) -> dict[str, Callable[[], Any]]:
    """What makes ranks meet, by the words for it in an error."""
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))

    def join() -> None:
        with Join([ddp]):
            pass

    model = torch.nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(3, 4), torch.ones(3, 2)
    loss = torch.nn.functional.mse_loss
    return {
        "make a ZeroRedundancyOptimizer": lambda: _zero(ddp, False),
        "add a group of parameters to a ZeroRedundancyOptimizer": lambda: zero.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(3))]}
        ),
        "consolidate the state of a ZeroRedundancyOptimizer": zero.consolidate_state_dict,
        "save the parts of a ZeroRedundancyOptimizer": zero.sharded_state_dict,
        "register a chain": lambda: chain(AllReduce()).register(ddp).remove(),
        "enter Join": join,
        "gather the state of a TrainState": TrainState(ddp, optim).state_dict,
        "call overlap.auto": lambda: auto(model, plain, sample=batch, loss=loss, seconds=0.1, quiet=True),
    }


def _for_different_purposes(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    purposes = _purposes(ddp)
    for pair in itertools.combinations(purposes, 2):
        start_s = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            purposes[pair[rank % 2]]()
        assert all(f"to {purpose}" in str(caught.value) for purpose in pair), str(caught.value)
        assert re.search(r"rank \d is about to .*, and rank \d to ", str(caught.value)), str(caught.value)
        assert time.monotonic() - start_s < _TIMEOUT_S / 2, f"{pair} is told only at the timeout"
    for purpose in ("make a ZeroRedundancyOptimizer", "register a chain", "enter Join"):
        purposes[purpose]()  # And all can go on.


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_meet_for_different_purposes_are_told_of_both(world_size: int) -> None:
    run_ranks(_for_different_purposes, world_size, group_timeout_s=_TIMEOUT_S, timeout_s=120)


def _has_ended(rank: int, world_size: int) -> str | None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    _zero(ddp, False)
    if rank == 1:
        os._exit(7)
    with pytest.raises(CollectiveError) as caught:
        _zero(ddp, False)
    return str(caught.value)


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    told, died = run_ranks(_has_ended, 2, group_timeout_s=60, timeout_s=30, return_exceptions=True)
    assert isinstance(died, RankDied)
    assert "was about to make a ZeroRedundancyOptimizer, but the process of rank 1 has ended" in told
