"""A mistake on one rank, where all are about to issue collectives, is an error on all at once."""

import itertools
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks, run_ranks, wrap
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
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    auto,
    chain,
)
from overlap.ranks.board import Agreement, agree

_TIMEOUT_S = 12


def _zero(ddp: Any, is_wrong: bool) -> Any:
    return ZeroRedundancyOptimizer([] if is_wrong else ddp.parameters(), torch.optim.SGD, lr=0.1)


def _registration(ddp: Any, is_wrong: bool) -> Any:
    parameters = torch.nn.Linear(2, 2).parameters() if is_wrong else ddp.parameters()
    optimizer = OverlappedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    return chain(AllReduce(), Step(optimizer)).register(ddp)


MADE: dict[str, Callable[[Any, bool], Any]] = {
    "ZeRO without parameters": _zero,
    "a registration of other parameters": _registration,
}


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_a_mistake_on_one_rank_is_an_error_on_all(rank: int, world_size: int) -> None:
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


@on_ranks(3)
def test_a_rank_that_does_not_come_is_named(rank: int, world_size: int) -> None:
    some = {late: dist.new_group(timeout=timedelta(seconds=1)) for late in range(world_size)}
    for late, group in some.items():
        dist.barrier()
        if rank != late:
            with pytest.raises(CollectiveError, match=rf"ranks \[{late}\] did not come to compare"):
                agree(group, "compare")


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_a_refusal_of_rank_0_is_an_error_on_all(rank: int, world_size: int) -> None:
    def decide(values: list[Any]) -> None:
        raise UnsupportedError(f"{values} cannot be compared")

    for _ in range(2):
        with (
            pytest.raises(UnsupportedError, match=r"\[0, 1\] cannot be compared"),
            Agreement(dist.group.WORLD, "compare") as one,
        ):
            one.agree(rank, decide)


def _purposes(ddp: Any) -> dict[str, Callable[[], Any]]:
    """What ranks enter together, by the words for it in an error."""
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
        "register a chain": lambda: chain(AllReduce()).register(ddp).remove(),
        "enter Join": join,
        "gather the state of a TrainState": TrainState(ddp, optim).gathered,
        "call overlap.auto": lambda: auto(model, plain, sample=batch, loss=loss, seconds=0.1, quiet=True),
    }


@on_ranks(2, group_timeout_s=_TIMEOUT_S, timeout_s=120)
def test_ranks_that_come_for_different_purposes_learn_of_both(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    purposes = _purposes(ddp)
    for pair in itertools.pairwise(purposes):
        start_s = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            purposes[pair[rank % 2]]()
        assert all(f"to {purpose}" in str(caught.value) for purpose in pair), str(caught.value)
        assert re.search(r"rank \d is about to .*, and rank \d to ", str(caught.value)), str(caught.value)
        assert time.monotonic() - start_s < _TIMEOUT_S / 2, f"{pair} is told only at the timeout"
    for purpose in ("make a ZeroRedundancyOptimizer", "register a chain", "enter Join"):
        purposes[purpose]()  # And all can go on.


class _LooksOnceTooEarly:
    """A store of which the first question is asked before the others have come."""

    def __init__(self, store: Any) -> None:
        self._store, self._is_early = store, True

    def check(self, keys: list[str]) -> bool:
        if self._is_early:
            self._is_early = False
            return False
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _agreed_before_a_failure(rank: int, world_size: int) -> Any:
    """Rank 0 fails as soon as it has the values; rank 1 has just looked for them, and then sees the failure."""
    if rank == 1:
        agreement = Agreement(dist.group.WORLD, "compare")
        board: Any = agreement._board
        board._store, peer_error = _LooksOnceTooEarly(board._store), board.peer_error
        board.peer_error = lambda: peer_error(within_s=20.0)
        return agreement.agree("yours", list)
    try:
        with Agreement(dist.group.WORLD, "compare") as agreement:
            raise ValueError(agreement.agree("mine", list))
    except ValueError as error:
        return error.args[0]


def test_a_rank_that_fails_after_an_agreement_does_not_hide_its_values() -> None:
    assert run_ranks(_agreed_before_a_failure, 2) == [["mine", "yours"]] * 2


def _fails_between_two_rounds(rank: int, world_size: int) -> str:
    try:
        with Agreement(dist.group.WORLD, "compare") as agreement:
            agreement.agree()
            if rank == 1:
                raise ZeroDivisionError("no such share")
            agreement.agree()
    except (ZeroDivisionError, PeerError) as error:
        return str(error)
    return ""


def test_a_failure_between_two_rounds_ends_the_second() -> None:
    assert run_ranks(_fails_between_two_rounds, 2, group_timeout_s=_TIMEOUT_S)[0] == (
        "another rank failed where all compare: rank 1: ZeroDivisionError: no such share"
    )
