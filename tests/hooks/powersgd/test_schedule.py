"""The rank as a function of the step and by parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import (
    CollectiveError,
    ConfigurationError,
    PowerSGD,
    PowerSGDState,
    batched_powerSGD_hook,
    register,
)
from overlap.hooks.powersgd.ranks import WINDOW

from .by_hand import ByHand
from .checks import EPS, check_step, gradients, memory, residuals, world_of
from .lockstep import World

RANKS = [4, 4, 2, 2, 5, 1, 3, 3, 2]


def falling(step: int) -> int:
    return max(1, 6 - step)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_schedule_computes_what_is_computed_by_hand(ranks: int, alternate: bool) -> None:
    world = world_of(ranks, [(12, 9), (5,)], rank=lambda step: RANKS[step], alternate=alternate)
    by_hand = ByHand(ranks, (12, 9), lambda step: RANKS[step], alternate=alternate)
    for step, rank in enumerate(RANKS):
        local = gradients(step, ranks, [(12, 9), (5,)], torch.float32)
        wanted = by_hand.step([own[0] for own in local])
        outputs = world.step(local)
        assert memory(world.stages[0]).slots["p0"].factor.shape[0] == rank
        for output, *_ in outputs:
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
        for stage, residual in zip(world.stages, by_hand.residuals, strict=True):
            torch.testing.assert_close(memory(stage).slots["p0"].residual, residual, rtol=1e-4, atol=2e-5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    ranks=st.integers(1, 3),
    by_step=st.lists(st.integers(1, 7), min_size=6, max_size=6),
    rate=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from(list(EPS)),
    alternate=st.booleans(),
    start_step=st.integers(0, 2),
    by_name=st.booleans(),
)
def test_nothing_is_lost_when_the_rank_changes(
    shapes: list[tuple[int, ...]],
    ranks: int,
    by_step: list[int],
    rate: float,
    dtype: torch.dtype,
    alternate: bool,
    start_step: int,
    by_name: bool,
) -> None:
    rank: Any = by_step.__getitem__
    if by_name:
        rank = {"p0": by_step.__getitem__, "*": 2} if len(shapes) > 1 else {"*": by_step.__getitem__}
    options = {"min_compression_rate": rate, "alternate": alternate, "start_step": start_step}
    world = World([PowerSGD(rank=rank, **options) for _ in range(ranks)], shapes)
    for step in range(len(by_step)):
        check_step(world, gradients(step, ranks, shapes, dtype), 64 * EPS[dtype])


def test_what_no_longer_pays_is_sent_exactly_with_what_was_left_out() -> None:
    shapes = [(10, 10), (40, 40)]
    stages = [PowerSGD(rank=lambda step: 9 if step == 3 else 1, min_compression_rate=2) for _ in range(2)]
    world = World(stages, shapes)
    for step in range(3):
        world.step(gradients(step, 2, shapes, torch.float32))
    pending, local = residuals(world), gradients(3, 2, shapes, torch.float32)
    output = world.step(local)[0]
    assert set(stages[0].state_dict()["residuals"]) == {"p1"}
    wanted = (local[0][0] + local[1][0] + pending[0].float()) / 2
    torch.testing.assert_close(output[0], wanted, rtol=1e-5, atol=1e-5)
    check_step(world, gradients(4, 2, shapes, torch.float32), 1e-5)
    assert set(stages[0].state_dict()["residuals"]) == {"p0", "p1"}


def test_by_parameter_the_first_pattern_that_matches_counts() -> None:
    shapes = [(10, 12), (10, 12), (20, 30), (7,)]
    world = world_of(2, shapes, rank={"p0": 3, "p[01]": 2, "*": 4})
    world.step(gradients(0, 2, shapes, torch.float32))
    assert world.sent_numel == [10 * 3 + 10 * 2 + 20 * 4 + 7, 12 * 3 + 12 * 2 + 30 * 4]
    check_step(world, gradients(1, 2, shapes, torch.float32), 1e-5)


@pytest.mark.parametrize(
    ("rank", "match"),
    [
        ({}, "rank is an empty mapping"),
        ({1: 2}, "rank has the key 1"),
        ({"*": 0}, r"rank\['\*'\].*at least 1, got 0"),
        (lambda step: 0, "rank in step 0 .*at least 1, got 0"),
        (lambda step: 2 if step < 40 else 0.5, "rank in step 40 .*got 0.5"),
        ({"p0": lambda step: True, "*": 2}, r"rank\['p0'\] in step 0 .*got True"),
        ({"p0": 2}, "no pattern for p1: end it with"),
        ({"p0": 2, "q*": 2, "*": 1}, r"'q\*'.*no parameter has such a name; there are p0, p1"),
        ({"p*": 2, "p0": 4}, "'p0'.*earlier pattern: put it first"),
    ],
)
def test_ranks_that_cannot_be_used_are_named_before_any_collective(rank: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        world_of(2, [(8, 6), (8, 6)], rank=rank)


def test_a_rank_for_the_rest_may_be_left_over() -> None:
    world = world_of(2, [(10, 12)], rank={"p0": 3, "*": 2})
    world.step(gradients(0, 2, [(10, 12)], torch.float32))
    assert world.sent_numel == [10 * 3, 12 * 3]


def test_by_parameter_it_needs_names() -> None:
    with pytest.raises(ConfigurationError, match=r"register_comm_hook; register it with overlap\.register"):
        World([PowerSGD(rank={"*": 2})], [(8, 6)], names=False)


def test_a_whole_bucket_has_one_rank() -> None:
    def world(rank: Any) -> World:
        return World([batched_powerSGD_hook.stage(PowerSGDState(None, rank, 0))], [(8, 6), (8, 6)])

    with pytest.raises(ConfigurationError, match=r"ranks \[2, 3\]: give one rank, or use powerSGD_hook"):
        world({"p0": 2, "*": 3}).step(gradients(0, 1, [(8, 6), (8, 6)], torch.float32))
    scheduled = world(lambda step: RANKS[step])
    for step in range(len(RANKS)):
        check_step(scheduled, gradients(step, 1, [(8, 6), (8, 6)], torch.float32), 1e-5)


def _steps(world: World, start: int, stop: int) -> list[Any]:
    return [world.step(gradients(step, len(world.stages), [(8, 6)], torch.float32)) for step in range(start, stop)]


def test_functions_that_differ_are_found_before_the_first_factor_and_nobody_hangs() -> None:
    functions: list[Callable[[int], int]] = [lambda step: 2, lambda step: 2 + (step == WINDOW - 1)]
    stages = [PowerSGD(rank=function, min_compression_rate=0) for function in functions]
    assert stages[0].signature != stages[1].signature, "registering would refuse them"
    with pytest.raises(ConfigurationError, match=rf"steps 0 to {WINDOW - 1}; on rank 0 .*same function"):
        _steps(World(stages, [(8, 6)]), 0, 1)


def test_functions_that_differ_later_are_found_when_that_comes_near() -> None:
    functions: list[Callable[[int], int]] = [lambda step: 2, lambda step: 2 + (step == WINDOW + 5)]
    stages = [PowerSGD(rank=function, min_compression_rate=0) for function in functions]
    assert stages[0].signature == stages[1].signature
    world = World(stages, [(8, 6)])
    sent = []
    for step in range(3):
        _steps(world, step, step + 1)
        sent.append(len(world.sent_bytes))
    assert sent == [3, 2, 2], "one comparison, in the first step"
    for stage in stages:
        memory(stage).steps = WINDOW
    for step in (WINDOW, WINDOW + 1):
        with pytest.raises(ConfigurationError, match=f"steps {step} to "):
            _steps(world, 0, 1)


def _registers(rank: int, world_size: int) -> None:
    def function(step: int) -> int:
        return 2 if step < 500 + rank else 1

    if rank == 0:
        register(wrap(MLP.model()), PowerSGD(rank=function))
        return
    with pytest.raises(
        CollectiveError, match=r"(?s)rank 2 from step 0, 1 from step 501.*rank 2 from step 0, 1 from step 500"
    ):
        register(wrap(MLP.model()), PowerSGD(rank=function))


def test_ranks_that_register_other_functions_are_told_so() -> None:
    run_ranks(_registers, 2)


def test_equal_functions_have_one_signature() -> None:
    one, other = PowerSGD(rank=lambda step: 4 if step < 10 else 2), PowerSGD(rank=lambda step: 2 + 2 * (step < 10))
    assert one.signature == other.signature
    assert "rank 4 from step 0, 2 from step 10" in one.signature and "0x" not in one.signature
    assert repr(one) == "PowerSGD(rank=<function of the step>)"
    assert repr(PowerSGD(rank={"a": 3, "*": falling})) == "PowerSGD(rank={'a': 3, '*': <function of the step>})"


def test_a_function_that_changes_its_mind_is_refused() -> None:
    current = [2]
    world = world_of(1, [(8, 6)], rank=lambda step: current[0])
    _steps(world, 0, 2)
    current[0] = 3
    with pytest.raises(ConfigurationError, match="gave 2 for step 2 when ranks compared it and gives 3 now"):
        _steps(world, 2, 3)


def test_a_list_of_ranks_may_end_with_the_training() -> None:
    world = world_of(2, [(8, 6)], rank=[3, 2].__getitem__)
    _steps(world, 0, 2)
    with pytest.raises(IndexError):
        _steps(world, 2, 3)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("at", [3, 5])
def test_a_run_resumes_exactly_in_mid_schedule(at: int, alternate: bool) -> None:
    def make() -> World:
        return world_of(2, [(8, 6)], rank=lambda step: [4, 4, 2, 2, 2, 5, 1, 3][step], alternate=alternate)

    whole = make()
    _steps(whole, 0, at)
    states = [stage.state_dict() for stage in whole.stages]
    resumed = make()
    for stage, state in zip(resumed.stages, states, strict=True):
        stage.load_state_dict(state)
    for one, other in zip(_steps(whole, at, 8), _steps(resumed, at, 8), strict=True):
        assert torch.equal(one[0][0], other[0][0])


def test_a_state_goes_on_with_another_rank() -> None:
    world = world_of(2, [(8, 6)], rank=2)
    _steps(world, 0, 3)
    other = world_of(2, [(8, 6)], rank=4)
    for stage, old in zip(other.stages, world.stages, strict=True):
        stage.load_state_dict(old.state_dict())
    torch.testing.assert_close(residuals(other)[0], residuals(world)[0])
    check_step(other, gradients(3, 2, [(8, 6)], torch.float32), 1e-5)
