"""Saving and loading, also with another number of ranks."""

import io
import pickle
from typing import Any

import pytest
import torch

from overlap import ConfigurationError, Int8, PowerSGD, PowerSGDState, powerSGD_hook

from .checks import check_step, gradients, residuals
from .lockstep import World

SHAPES = [(8, 6), (5,), (6, 4, 3), (8, 6)]


def through_a_file(state: Any) -> Any:
    """As `torch.save` and `torch.load(weights_only=True)` give it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def make(**options: Any) -> PowerSGD:
    return PowerSGD(rank=2, min_compression_rate=0, **options)


def run(world: World, start: int, stop: int) -> list[torch.Tensor]:
    outputs = []
    for step in range(start, stop):
        outputs += world.step(gradients(step, len(world.stages), SHAPES, torch.float32))[0]
    return outputs


def test_resume_is_exact_without_names() -> None:
    """tests/resume has the same with names."""
    options: dict[str, Any] = {"alternate": True, "wire": Int8(rounding="stochastic")}
    world = World([make(**options) for _ in range(2)], SHAPES, names=False)
    run(world, 0, 3)
    states = [through_a_file(stage.state_dict()) for stage in world.stages]
    expected = run(world, 3, 6)
    resumed = [make(**options) for _ in range(2)]
    other = World(resumed, SHAPES, names=False)
    for stage, state in zip(resumed, states, strict=True):
        stage.load_state_dict(state)
    for found, wanted in zip(run(other, 3, 6), expected, strict=True):
        assert torch.equal(found, wanted)
    assert resumed[0].compression_stats() == world.stages[0].compression_stats()  # type: ignore[attr-defined]


def test_a_pickled_powersgdstate_continues_the_same_run() -> None:
    assert pickle.loads(pickle.dumps(powerSGD_hook)) is powerSGD_hook
    states = [PowerSGDState(None, 2, 0, 0.0) for _ in range(2)]
    world = World([powerSGD_hook.stage(state) for state in states], SHAPES)
    run(world, 0, 3)
    copies = pickle.loads(pickle.dumps(states))
    assert copies[0].process_group is None and copies[0].iter == 3
    expected = run(world, 3, 6)
    found = run(World([powerSGD_hook.stage(state) for state in copies], SHAPES), 3, 6)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_another_number_of_ranks_keeps_the_pending_mean() -> None:
    """What is still to come in the mean over ranks is the residuals' sum divided by their number."""
    world = World([make() for _ in range(4)], SHAPES)
    run(world, 0, 3)
    pending = [total / 4 for total in residuals(world)]
    for ranks in (3, 2, 4):
        states = [through_a_file(stage.state_dict()) for stage in world.stages]
        world = World([make() for _ in range(ranks)], SHAPES)
        for rank, stage in enumerate(world.stages):
            stage.load_state_dict(PowerSGD.redistribute(states, rank=rank, ranks=ranks))
        for found, wanted in zip(residuals(world), pending, strict=True):
            torch.testing.assert_close(found / ranks, wanted, rtol=0, atol=1e-5)
    # It arrives once: with gradients of zero, outputs add up to it.
    arrived = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for _ in range(25):
        outputs = world.step([[torch.zeros(shape) for shape in SHAPES] for _ in range(4)])[0]
        arrived = [total + one for total, one in zip(arrived, outputs, strict=True)]
    for found, wanted in zip(arrived, pending, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)


def test_redistribute_refuses_states_that_do_not_belong_together() -> None:
    world = World([make() for _ in range(4)], SHAPES)
    run(world, 0, 2)
    states = [stage.state_dict() for stage in world.stages]
    for given, rank, match in (
        (states[:2], 1, r"state of every old rank once, but was given ranks \[0, 1\] of \[4\]"),
        (states, 2, "rank=2 is out of range for ranks=2"),
        ([], 0, "state of every old rank"),
        ([*states[:3], {**states[3], "steps": 3}], 0, r"different runs or steps, after \[2, 3\] steps"),
        ([make().state_dict()], 0, "a state does not say its rank"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            PowerSGD.redistribute(given, rank=rank, ranks=2)


def test_a_state_that_does_not_fit_is_refused() -> None:
    """tests/hooks/quantize has more of the same memory."""
    three = World([make() for _ in range(3)], SHAPES)
    run(three, 0, 1)
    stages = [make() for _ in range(2)]
    World(stages, SHAPES)
    for state, message in (
        (three.stages[0].state_dict(), r"saved by rank 0 of 3, but this is rank 0 of 2.*PowerSGD.redistribute"),
        ({"step": 3}, "not a state of PowerSGD"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            stages[0].load_state_dict(state)


@pytest.mark.parametrize(("rank", "alternate"), [(1, False), (4, True)])
def test_a_state_goes_on_with_another_rank(rank: int, alternate: bool) -> None:
    world = World([make(alternate=alternate) for _ in range(2)], SHAPES)
    run(world, 0, 3)
    other = World([PowerSGD(rank=rank, min_compression_rate=0, alternate=alternate) for _ in range(2)], SHAPES)
    for stage, old in zip(other.stages, world.stages, strict=True):
        stage.load_state_dict(old.state_dict())
    for one, old in zip(residuals(other), residuals(world), strict=True):
        torch.testing.assert_close(one, old)
    for step in range(3, 6):
        check_step(other, gradients(step, 2, SHAPES, torch.float32), 1e-5)


def test_what_no_longer_pays_is_sent_exactly_with_what_was_left_out() -> None:
    shapes = [(10, 10), (40, 40)]
    world = World([PowerSGD(rank=1, min_compression_rate=2) for _ in range(2)], shapes)
    for step in range(3):
        world.step(gradients(step, 2, shapes, torch.float32))
    stages = [PowerSGD(rank=9, min_compression_rate=2) for _ in range(2)]
    other = World(stages, shapes)
    for stage, old in zip(stages, world.stages, strict=True):
        stage.load_state_dict(old.state_dict())
    pending, local = residuals(other), gradients(3, 2, shapes, torch.float32)
    output = other.step(local)[0]
    assert set(stages[0].state_dict()["residuals"]) == {"p1"}
    wanted = (local[0][0] + local[1][0] + pending[0].float()) / 2
    torch.testing.assert_close(output[0], wanted, rtol=1e-5, atol=1e-5)
    check_step(other, gradients(4, 2, shapes, torch.float32), 1e-5)
