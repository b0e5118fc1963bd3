"""What a chain takes and refuses, and what it remembers."""

from typing import Any

import pytest
import torch
from torch import nn

import overlap
from harness import on_ranks, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ConfigurationError,
    Stage,
    Step,
    as_hook,
    chain,
)

from .runs import SGD


def _step() -> Step:
    return Step(SGD(nn.Linear(2, 2).parameters()))


def test_a_chain_needs_a_stage() -> None:
    with pytest.raises(ConfigurationError, match="at least one stage"):
        chain()


def test_chains_in_a_chain_are_taken_apart() -> None:
    assert repr(chain(chain(Cast(torch.bfloat16)), _step())) == (
        "chain(Cast(bfloat16, AllReduce()), Step(SGD, interleaved))"
    )


class _Memory(Stage):
    """The mean, and how often each parameter was seen."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    async def __call__(self, bucket: overlap.Bucket) -> None:
        for name in bucket.names:
            self.seen[name] = self.seen.get(name, 0) + 1
        await AllReduce()(bucket)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = dict(state_dict)


def test_a_chain_refuses_the_state_of_a_stage_that_it_lacks() -> None:
    with pytest.raises(ConfigurationError, match=r"has no state \['7'\]"):
        chain(_Memory()).load_state_dict({"7": {}})


def _names_in_a_hook(rank: int) -> None:
    by_hook = wrap(MLP.model(), **MLP.ddp_options())
    by_hook.register_comm_hook(None, as_hook(_Memory()))
    with pytest.raises(ConfigurationError, match=r"overlap.register\(ddp, hook\)"):
        by_hook(*MLP.batch(0, rank).inputs).sum().backward()


def test_a_function_of_a_bucket_is_a_transform_unless_it_is_marked() -> None:
    def halve(bucket: Bucket) -> None:
        bucket.buffer.mul_(0.5)

    assert repr(chain(halve, AllReduce(), halve, _step(), halve)) == (
        "chain(halve, AllReduce(), halve, Step(SGD, interleaved), halve)"
    )
    with pytest.raises(ConfigurationError, match=r"halve: no stage here reduces.*@overlap.reducer"):
        chain(halve)
    with pytest.raises(ConfigurationError, match=r"needs a reducer.*@overlap.reducer"):
        chain(halve, _step())
    assert chain(overlap.reducer(halve)).role is overlap.hooks.Role.REDUCER


def test_a_mark_on_what_is_not_a_function_of_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="marks a function of one bucket"):
        overlap.reducer(lambda state, bucket: None)


def _returned_value(rank: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce(), lambda bucket: bucket.buffer * 2).register(ddp)
    with pytest.raises(ConfigurationError, match="returned Tensor: a function of a bucket changes"):
        ddp(*MLP.batch(0, rank).inputs).sum().backward()


@on_ranks(2)
def test_names_are_not_known_to_a_hook_and_a_function_returns_nothing(rank: int, world_size: int) -> None:
    _names_in_a_hook(rank)
    _returned_value(rank)
