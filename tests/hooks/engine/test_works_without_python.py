"""What a chain issues in backward keeps no Python object that Gloo's thread would have to let go of."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, as_stage, chain
from overlap._torch.autograd import issue_without_saved_context, without_saved_context

# Versions that keep nothing there in backward, or never let go of it.
pytestmark = pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot take it away")

INLINE, ON_A_WORKER = str(2**20), "0"
STEPS = 8


def _saved() -> Any:
    return torch._C._get_obj_in_tls("context")


def _observed(ddp: DistributedDataParallel) -> list[weakref.ref[Any]]:
    """What PyTorch keeps in each backward, from now on."""
    seen: list[weakref.ref[Any]] = []
    list(ddp.parameters())[-1].register_hook(lambda gradient: seen.append(weakref.ref(_saved())))
    return seen


def _held(ddp: DistributedDataParallel, rank: int, seen: list[weakref.ref[Any]]) -> int:
    """In how many steps that is still held when backward has returned."""
    held = 0
    for step in range(STEPS):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        held += seen[-1]() is not None
    assert len(seen) == STEPS
    return held


def _chain(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    assert _held(ddp, rank, _observed(ddp)) == 0


@pytest.mark.parametrize("limit_bytes", [INLINE, ON_A_WORKER])
def test_works_of_a_chain_hold_nothing(limit_bytes: str) -> None:
    run_ranks(_chain, 2, env={"OVERLAP_SMALL_MODEL_BYTES": limit_bytes})


def _removed(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp).remove()
    assert _held(ddp, rank, _observed(ddp)) == 0


def test_works_of_a_model_whose_chain_was_removed_hold_nothing() -> None:
    run_ranks(_removed, 2)


def _seen_by_a_hook(rank: int, world_size: int) -> None:
    is_there: list[bool] = []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        is_there.append(torch._C._is_key_in_tls("context"))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = wrap(MLP.model(), **MLP.ddp_options())
    last, first = list(ddp.parameters())[-1], next(ddp.parameters())
    seen: list[Any] = []
    for parameter in (last, first):
        parameter.register_hook(lambda gradient: seen.append(_saved()))
    chain(as_stage(hook)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    assert is_there and not any(is_there)
    assert seen[0] is not None and seen[0] is seen[1]


def test_a_hook_is_called_without_it_and_the_rest_of_backward_has_it() -> None:
    run_ranks(_seen_by_a_hook, 2)


def test_it_is_put_back_after_an_error() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[Any] = []

    @without_saved_context()
    def fail() -> None:
        assert not torch._C._is_key_in_tls("context")
        raise ValueError("on purpose")

    def look(gradient: torch.Tensor) -> None:
        before = _saved()
        with pytest.raises(ValueError, match="on purpose"):
            fail()
        seen.append(before is _saved())

    weight.register_hook(look)
    weight.sum().backward()
    assert seen == [True]


def _plain(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    seen = _observed(ddp)  # Before it is taken away: hooks run in the order in which they were registered.
    issue_without_saved_context(ddp.parameters())
    assert _held(ddp, rank, seen) == 0


def test_works_of_plain_ddp_hold_nothing_where_asked_for() -> None:
    run_ranks(_plain, 2)
