"""`bypass="auto"`: compress only where that is faster."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import PowerSGD, PowerSGDState, batched_powerSGD_hook, powerSGD_hook, register
from overlap.hooks import measure

from .checks import check_step, gradients, residuals
from .lockstep import World

SHAPES = [(8, 6), (5,), (6, 4, 3)]


def _clock(monkeypatch: pytest.MonkeyPatch, times_ms: list[float]) -> None:
    """Times of sending and of compressing, in turn, as each rank measures them."""
    remaining = list(times_ms)

    async def best_ms(run: Any, device: torch.device) -> float:
        await run()
        return remaining.pop(0)

    monkeypatch.setattr(measure, "_best_ms", best_ms)


@pytest.fixture
def bypassed(monkeypatch: pytest.MonkeyPatch) -> World:
    """Two ranks that have just decided to bypass: rank 1 alone would compress, the mean of the times says no."""
    # Each rank's time of sending, then of compressing.
    _clock(monkeypatch, [1.0, 4.0, 8.0, 2.0])
    world = World([PowerSGD(rank=1, min_compression_rate=0, bypass="auto") for _ in range(2)], SHAPES)
    for step in range(3):
        check_step(world, gradients(step, 2, SHAPES, torch.float32), 1e-5)
    return world


def test_the_decision_and_its_times_are_shown(bypassed: World) -> None:
    for stage in bypassed.stages:
        assert repr(stage) == "PowerSGD(rank=1, min_compression_rate=0, bypass='auto', 2 parameters bypassed)"
        assert "sent as it is: 5.00 ms compressed, 2.50 ms as it is" in stage.signature


def test_where_it_does_not_pay_what_was_kept_is_given_away_in_the_next_step(bypassed: World) -> None:
    assert any(float(residual.abs().max()) > 0 for residual in residuals(bypassed))
    check_step(bypassed, gradients(3, 2, SHAPES, torch.float32), 1e-5)
    assert len(bypassed.sent_numel) == 1
    assert all(float(residual.abs().max()) == 0 for residual in residuals(bypassed))


def test_where_it_does_not_pay_the_mean_is_exact_from_then_on(bypassed: World) -> None:
    bypassed.step(gradients(3, 2, SHAPES, torch.float32))
    local = gradients(4, 2, SHAPES, torch.float32)
    for place, output in enumerate(bypassed.step(local)[0]):
        assert torch.equal(output, local[0][place] * 0.5 + local[1][place] * 0.5)


def _whole_buckets(bypass: Literal["auto"] | None) -> PowerSGD:
    return batched_powerSGD_hook.stage(PowerSGDState(None, 1, 0, bypass=bypass))


def _by_parameter(bypass: Literal["auto"] | None) -> PowerSGD:
    return PowerSGD(rank=1, min_compression_rate=0, bypass=bypass)


@pytest.mark.parametrize("make", [_by_parameter, _whole_buckets])
def test_where_it_pays_nothing_changes(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    _clock(monkeypatch, [8.0, 1.0])
    stages = [make(option) for option in ("auto", None)]
    worlds = [World([stage], SHAPES) for stage in stages]
    for step in range(6):
        outputs = [world.step(gradients(step, 1, SHAPES, torch.float32))[0] for world in worlds]
        assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert "compressed: 1.00 ms compressed, 8.00 ms as it is" in stages[0].signature


def test_a_decision_is_part_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, [1.0, 8.0])
    world = World([PowerSGD(rank=1, min_compression_rate=0, bypass="auto")], SHAPES)
    for step in range(3):
        world.step(gradients(step, 1, SHAPES, torch.float32))
    state = world.stages[0].state_dict()
    assert state["bypassed"] == ["p0", "p2"]
    resumed = PowerSGD(rank=1, min_compression_rate=0, bypass="auto")
    resumed.load_state_dict(state)
    other = World([resumed], SHAPES)
    local = gradients(3, 1, SHAPES, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(other.step(local)[0], world.step(local)[0], strict=True))
    assert len(other.sent_numel) == 1


def _measure_on_ranks(rank: int, world_size: int) -> tuple[str, list[str], list[float]]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    stage = PowerSGD(rank=1, min_compression_rate=0, bypass="auto")
    register(ddp, stage)
    for step in range(6):
        ddp.zero_grad()
        ddp(*MLP.batch(step, rank).inputs).square().sum().backward()
    norms = [float(parameter.grad.norm()) for parameter in ddp.parameters() if parameter.grad is not None]
    return stage.signature, stage.state_dict()["bypassed"], norms


def test_every_rank_comes_to_the_same_decisions() -> None:
    found = run_ranks(_measure_on_ranks, 3)
    assert found[0] == found[1] == found[2]
    signature, _, _ = found[0]
    assert signature.count("ms as it is") >= 3, "of several buckets"


def test_bypass_is_an_option_of_powersgdstate_too() -> None:
    assert "bypass='auto'" in repr(powerSGD_hook.stage(PowerSGDState(None, bypass="auto")))
