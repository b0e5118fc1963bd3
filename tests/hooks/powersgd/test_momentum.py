"""Momentum before compression."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, overlapped_step, plain_step, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, ConfigurationError, Int8, OverlappedOptimizer, PowerSGD, Step, chain, register, route

from .by_hand import ByHand
from .checks import gradients, memory
from .lockstep import World

SHAPES = [(12, 9), (5,)]


def world_with(ranks: int, shapes: list[tuple[int, ...]] = SHAPES, *, momentum: float = 0.9, **options: Any) -> World:
    # The optimizer is looked at when names are known; here they are the world's own parameters'.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    made = {"rank": 2, "min_compression_rate": 0, "momentum": momentum, "optimizer": optimizer, **options}
    return World([PowerSGD(**made) for _ in range(ranks)], shapes, names=False)


@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"wire": Int8()}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_momentum_computes_what_is_computed_by_hand(ranks: int, options: dict[str, Any]) -> None:
    world = world_with(ranks, rank=lambda step: 3 if step < 4 else 2, **options)
    by_hand = ByHand(ranks, (12, 9), lambda step: 3 if step < 4 else 2, momentum=0.9, **options)
    velocity = torch.zeros(5)
    for step in range(8):
        local = gradients(step, ranks, SHAPES, torch.float32)
        wanted = by_hand.step([own[0] for own in local])
        velocity = 0.9 * velocity + sum(own[1] for own in local) / ranks
        for matrix, vector in world.step(local):
            torch.testing.assert_close(matrix, wanted, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(vector, velocity, rtol=1e-5, atol=1e-6)
        for rank, stage in enumerate(world.stages):
            slot = memory(stage).slots["0"]
            torch.testing.assert_close(slot.velocity, by_hand.velocities[rank], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(slot.residual, by_hand.residuals[rank], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_is_not_finite_leaves_its_velocity(place: int, value: float) -> None:
    world = world_with(2)
    for step in range(3):
        world.step(gradients(step, 2, SHAPES, torch.float32))
    before = [stage.state_dict()["velocities"] for stage in world.stages]
    local = gradients(3, 2, SHAPES, torch.float32)
    local[1][place].view(-1)[2] = value
    outputs = world.step(local)
    assert not any(bool(own[place].isfinite().all()) for own in outputs)
    for stage, old in zip(world.stages, before, strict=True):
        new = stage.state_dict()["velocities"]
        assert torch.equal(new[str(place)], old[str(place)])
        assert not torch.equal(new[str(1 - place)], old[str(1 - place)])


@pytest.mark.parametrize("at", [1, 4])
def test_a_run_resumes_exactly_with_its_velocities(at: int) -> None:
    def steps(world: World, start: int, stop: int) -> list[Any]:
        return [world.step(gradients(step, 2, SHAPES, torch.float32)) for step in range(start, stop)]

    # The first two steps are exact, and have velocities, too.
    whole, resumed = (world_with(2, start_step=2) for _ in range(2))
    steps(whole, 0, at)
    for stage, other in zip(resumed.stages, whole.stages, strict=True):
        stage.load_state_dict(other.state_dict())
    for one, other in zip(steps(whole, at, 7), steps(resumed, at, 7), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    states = [stage.state_dict() for stage in whole.stages]
    alone = PowerSGD.redistribute(states, rank=0, ranks=1)["velocities"]
    for key, velocity in alone.items():
        mean = (states[0]["velocities"][key] + states[1]["velocities"][key]) / 2
        torch.testing.assert_close(velocity, mean)


def test_a_joined_ranks_velocity_runs_out() -> None:
    world = world_with(2)
    for step in range(3):
        world.step(gradients(step, 2, SHAPES, torch.float32))
    for _ in range(150):
        outputs = world.step([[torch.zeros(shape) for shape in SHAPES]] * 2, replays=[1])
    for stage in world.stages:
        assert all(float(velocity.abs().max()) < 1e-4 for velocity in stage.state_dict()["velocities"].values())
    assert all(float(output.abs().max()) < 1e-3 for output in outputs[0])


def _sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1, **options)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PowerSGD(momentum=0.9), "momentum= and optimizer= go together"),
        (lambda: PowerSGD(optimizer=_sgd()), "momentum= and optimizer= go together"),
        (lambda: PowerSGD(momentum=1.0, optimizer=_sgd()), "momentum must be less than 1, got 1.0"),
        (lambda: PowerSGD(momentum=-0.1, optimizer=_sgd()), "momentum must be a number of at least 0, got -0.1"),
    ],
)
def test_momentum_without_a_look_at_the_optimizer_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


def _never_twice(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    def made(optimizer: torch.optim.Optimizer) -> PowerSGD:
        return PowerSGD(momentum=0.9, optimizer=optimizer, min_compression_rate=0)

    for optimizer, match in (
        (torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.8), r"SGD has its own of 0.8: give SGD\(..., momentum=0"),
        (torch.optim.AdamW(ddp.parameters()), r"AdamW has its own of \(0.9, 0.999\)"),
        (torch.optim.Adagrad(ddp.parameters()), "Adagrad has no such option"),
        (_sgd(), r"does not have the parameter .* \(of \d+\): give the optimizer that updates this model"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            register(ddp, made(optimizer))
    mixed = torch.optim.SGD([{"params": list(ddp.parameters())}], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"group 0 of SGD has [1-9]\d* parameters that this PowerSGD does not"):
        register(ddp, route({"0.weight": made(mixed), "*": AllReduce()}))
    first, *rest = ddp.parameters()
    apart = torch.optim.SGD([{"params": [first], "momentum": 0}, {"params": rest, "momentum": 0.9}], lr=0.1)
    register(ddp, route({"0.weight": made(apart), "*": AllReduce()})).remove()
    # A schedule that sets it later is noticed in that pass.
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    register(ddp, made(sgd))
    plain_step(ddp, sgd, MLP.batch(0, rank), mean_squared_error)
    sgd.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigurationError, match=r"SGD has its own of 0.9"):
        plain_step(ddp, sgd, MLP.batch(1, rank), mean_squared_error)
    sgd.param_groups[0]["momentum"] = 0
    plain_step(ddp, sgd, MLP.batch(1, rank), mean_squared_error)


def _through_ddp(rank: int, world_size: int) -> None:
    """Where nothing pays, it is SGD's own momentum; with all options at once, ranks stay equal and a run resumes."""
    plain, exact = (wrap(copy.deepcopy(MLP.model()), **MLP.ddp_options()) for _ in range(2))
    with_momentum = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    without = OverlappedOptimizer(torch.optim.SGD(exact.parameters(), lr=0.05))
    chain(PowerSGD(rank=64, momentum=0.9, optimizer=without), Step(without)).register(exact)
    for batch in MLP.batches(rank, steps=5):
        plain_step(plain, with_momentum, batch, mean_squared_error)
        overlapped_step(exact, without, batch, mean_squared_error)
        assert_parity(
            exact.module.state_dict(), plain.module.state_dict(), what="nothing compressed", exact=False, rtol=1e-4,
            atol=1e-6, reason="velocities are summed over ranks, where SGD sums gradients",
        )  # fmt: skip

    def start() -> tuple[DistributedDataParallel, OverlappedOptimizer, PowerSGD]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.02))
        stage = PowerSGD(
            rank={"0.*": lambda step: 3 if step < 4 else 1, "*": 2},
            min_compression_rate=0,
            wire=Int8(rounding="stochastic"),
            momentum=0.5,
            optimizer=optimizer,
        )
        chain(stage, Step(optimizer)).register(ddp)
        return ddp, optimizer, stage

    ddp, optimizer, stage = start()
    for step in range(3):
        overlapped_step(ddp, optimizer, MLP.batch(step, rank), mean_squared_error)
    resumed, other_optimizer, other_stage = start()
    resumed.module.load_state_dict(ddp.module.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    other_stage.load_state_dict(stage.state_dict())
    for step in range(3, 7):
        for model, own in ((ddp, optimizer), (resumed, other_optimizer)):
            overlapped_step(model, own, MLP.batch(step, rank), mean_squared_error)
        assert_parity(resumed.module.state_dict(), ddp.module.state_dict(), what=f"resumed, step {step}")
    assert stage.compression_stats()[0] > 1
    for parameter in ddp.parameters():
        reference = parameter.detach().clone()
        dist.broadcast(reference, 0)
        assert torch.equal(parameter, reference)


def _both(rank: int, world_size: int) -> None:
    _through_ddp(rank, world_size)
    if world_size == 2:
        _never_twice(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_through_ddp_momentum_is_applied_once_and_resumes_exactly(world_size: int) -> None:
    run_ranks(_both, world_size)
