"""Plans beside coroutines: the same collectives, the same bits, the same errors. See [Note: plans]."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.host_cost import IdleStreams
from bucket_functions import Ones
from harness.streams import one_process
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ClipGradNorm,
    Int8,
    Log,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Stage,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    route,
)
from overlap._torch.device import DeviceStreams, streams_replaced
from overlap.hooks import Role
from overlap.hooks.collectives import Operation
from overlap.hooks.engine import runtime
from overlap.hooks.engine.registration import registration_of


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def halve(bucket: Bucket) -> None:
    assert bucket.is_mean
    bucket.buffer.mul_(0.5)


reports: list[tuple[int, dict[str, torch.Tensor]]] = []


def log() -> Log:
    return Log(lambda *report: reports.append(report))


def _stepped(*before: Any, **options: Any) -> Callable[[Any], Any]:
    def register(ddp: DistributedDataParallel) -> Any:
        optimizer = OverlappedOptimizer(_adamw(ddp.parameters()))
        chain(*before, Step(optimizer, **options)).register(ddp)
        return optimizer

    return register


def _reduced(*stages: Any) -> Callable[[Any], Any]:
    def register(ddp: DistributedDataParallel) -> Any:
        chain(*stages).register(ddp)
        return _adamw(ddp.parameters())

    return register


def _automatic(*behind: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda ddp: chain(AllReduce(), Step(_adamw(ddp.parameters()), **options), *behind).register(ddp) and None


def _sharded(*before: Any, **options: Any) -> Callable[[Any], Any]:
    def register(ddp: DistributedDataParallel) -> Any:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, foreach=True)
        chain(*before, ZeroStep(zero, **options)).register(ddp)
        return zero

    return register


CHAINS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "AllReduce": lambda: _reduced(AllReduce()),
    "Cast": lambda: _reduced(Cast(torch.bfloat16)),
    "Cast of the same dtype": lambda: _reduced(Cast(torch.float32)),
    "Cast of another reducer": lambda: _reduced(Cast(torch.float16, Cast(torch.bfloat16))),
    "Quantize": lambda: _reduced(Quantize(Int8())),
    "PowerSGD": lambda: _reduced(PowerSGD(rank=1, min_compression_rate=1.0)),
    "route": lambda: _reduced(route({"*.bias": AllReduce(), "*": Cast(torch.bfloat16)})),
    "route in pieces": lambda: _reduced(route({"*.bias": Quantize(Int8()), "*": Cast(torch.bfloat16)})),
    "route of matrices in pieces": lambda: _reduced(
        route({"*.bias": AllReduce(), "*": PowerSGD(min_compression_rate=1)})
    ),
    "route with feedback": lambda: _reduced(route({"[01].*": AllReduce(), "*": Quantize(Int8(), error_feedback=True)})),
    "route to a coroutine": lambda: _reduced(route({"0.*": AllReduce(), "*": Cast(torch.half, Cast(torch.bfloat16))})),
    "Step": lambda: _stepped(AllReduce()),
    "Step, deferred": lambda: _stepped(AllReduce(), deferred=True),
    "Step, released": lambda: _stepped(AllReduce(), release_gradients=True),
    "Step, automatic": _automatic,
    "Step, automatic, deferred": lambda: _automatic(deferred=True),
    "a function between": lambda: _stepped(AllReduce(), halve),
    "a function behind": lambda: _reduced(AllReduce(), halve),
    "a clip and logs": lambda: _stepped(log(), AllReduce(), log(), ClipGradNorm(0.1), log()),
    "a log of new parameters": lambda: _automatic(log()),
    "a count": lambda: _stepped(Ones(), AllReduce()),
    "a skip": lambda: _stepped(Cast(torch.bfloat16), SkipNonFinite()),
    "ZeroStep": _sharded,
    "ZeroStep, deferred": lambda: _sharded(deferred=True),
    "ZeroStep, deferred, automatic": lambda: _sharded(deferred=True, automatic=True),
    "ZeroStep behind a reducer": lambda: _sharded(AllReduce()),
    "ZeroStep, deferred, behind a reducer": lambda: _sharded(AllReduce(), deferred=True),
    "ZeroStep in forward": lambda: _sharded(gather="forward"),
    "ZeroStep in forward, behind a log": lambda: _sharded(log(), gather="forward"),
    "ZeroStep behind a clip": lambda: _sharded(ClipGradNorm(0.1)),
}


class _Launches:
    """An observer of what is launched, and in which order."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, str, str]] = []

    def launched(self, subject: Any, label: str, operation: Operation) -> None:
        self.log.append((subject.step, subject.index, label, operation.label))

    def arrived(self, bucket: Bucket) -> None: ...
    def running(self, subject: Any, label: str) -> None: ...
    def ran(self, subject: Any, label: str) -> None: ...
    def waiting(self, subject: Any, operation: Operation) -> None: ...
    def finished(self, subject: Any, operation: Operation) -> None: ...


def _wrapped(*, layers_a_bucket: int = 1) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    return DistributedDataParallel(model, bucket_cap_mb=layers_a_bucket * 288 / 2**20, gradient_as_bucket_view=True)


def _train(ddp: Any, optimizer: Any, steps: int = 4, leaves_every: int = 0) -> None:
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with optimizer.skip_update() if leaves_every and step % leaves_every == 0 else nullcontext():
            ddp(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(autouse=True, params=["streams", "a thread"])
def _group(request: pytest.FixtureRequest) -> Iterator[None]:
    with one_process(2), streams_replaced(IdleStreams() if request.param == "streams" else DeviceStreams()):
        yield


def _played(name: str, **training: Any) -> tuple[list[Any], list[torch.Tensor], set[bool]]:
    """The launches and reports, their results, and whether the pieces that ran were plans, coroutines or both."""
    reports.clear()
    ddp, observer = _wrapped(layers_a_bucket=2 if "pieces" in name else 1), _Launches()
    optimizer = CHAINS[name]()(ddp)
    registration = registration_of(ddp)
    assert registration is not None
    registration.runtime.executor.observer = observer
    _train(ddp, optimizer, **training)
    kept = registration.runtime._kept.values()
    norms = [norm for _, norms in reports for norm in norms.values()]
    whole = [*[step for step, _ in reports], *observer.log]
    planned = {piece.is_planned for one in kept for piece in one.task._pieces}
    return whole, [*norms, *[parameter.detach().clone() for parameter in ddp.parameters()]], planned


@pytest.mark.parametrize("name", CHAINS)
def test_plans_launch_what_coroutines_do_in_the_same_order_with_the_same_bits(name: str) -> None:
    log, parameters, planned = _played(name)
    with mock.patch.object(runtime, "planner", return_value=lambda bucket: None):
        expected, as_coroutines, none = _played(name)
    assert log == expected and log and none <= {False}
    # Messages between the ranks of one process have no values.
    assert name.startswith("ZeroStep") or all(map(torch.equal, parameters, as_coroutines))
    unless: dict[str, set[bool]] = {"Cast of another reducer": {False}, "Step, released": set()}
    has_coroutines = "a function" in name or name == "route to a coroutine"
    assert planned == unless.get(name, {True, not has_coroutines})


@pytest.mark.parametrize("name", ["Step", "ZeroStep"])
def test_a_plan_is_made_again_where_the_update_is_left_to_step(name: str) -> None:
    log, parameters, planned = _played(name, steps=6, leaves_every=3)
    with mock.patch.object(runtime, "planner", return_value=lambda bucket: None):
        expected, as_coroutines, _ = _played(name, steps=6, leaves_every=3)
    assert planned == {True} and log == expected
    assert name == "ZeroStep" or all(map(torch.equal, parameters, as_coroutines))


def test_a_subclass_that_changes_the_coroutine_alone_runs_as_one() -> None:
    class Doubled(AllReduce):
        async def __call__(self, bucket: Bucket) -> None:
            await super().__call__(bucket)
            seen.append(bucket.step)

    seen: list[int] = []
    ddp = _wrapped()
    chain(Doubled()).register(ddp)
    _train(ddp, None, 3)
    assert set(seen) == {0, 1, 2}


def _gradients(ddp: Any) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(torch.ones(4, 8)).square().mean().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def test_a_plan_is_made_again_where_the_divisor_is_another() -> None:
    ddp = _wrapped()
    chain(AllReduce()).register(ddp)
    first, second = _gradients(ddp), _gradients(ddp)
    with mock.patch.object(runtime, "gradient_divisor", return_value=1):
        undivided = _gradients(ddp)
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(2 * one, other) for one, other in zip(first, undivided, strict=True))
    assert all(map(torch.equal, first, _gradients(ddp)))


def test_a_plan_does_not_run_where_a_parameter_has_other_strides() -> None:
    ddp = _wrapped()
    chain(AllReduce()).register(ddp)
    for _ in range(2):
        _gradients(ddp)
    weight = ddp.module[1].weight
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(TrainingLoopError, match=r"1\.weight has strides"):
        _gradients(ddp)


class _Failing(Stage):
    """A transform with a plan that fails when it is told to."""

    role = Role.TRANSFORM

    def __init__(self) -> None:
        self.fails = False

    async def __call__(self, bucket: Bucket) -> None: ...

    def plan(self, bucket: Bucket) -> Any:
        def check() -> None:
            if self.fails and bucket.index == 1:
                raise ValueError("broken on purpose")

        return (check,)

    def __repr__(self) -> str:
        return "Failing()"


def test_an_error_in_a_plan_names_its_stage_and_leaves_the_model_usable() -> None:
    ddp, stage = _wrapped(), _Failing()
    chain(AllReduce(), stage).register(ddp)
    first = [_gradients(ddp), _gradients(ddp)][0]
    stage.fails = True
    with pytest.raises(ValueError, match="broken on purpose") as caught:
        _gradients(ddp)
    assert caught.value.__notes__[0].startswith("raised in stage Failing(), bucket 1, step 2 (")
    stage.fails = False
    assert all(map(torch.equal, first, _gradients(ddp))) and all(map(torch.equal, first, _gradients(ddp)))


def _notes_of_a_lost_collective(ddp: Any, step: int) -> list[str]:
    for _ in range(step):
        _gradients(ddp)
    with (
        mock.patch("overlap.hooks.collectives.Collective.finish", side_effect=RuntimeError("lost")),
        pytest.raises(RuntimeError, match="lost") as caught,
    ):
        _gradients(ddp)
    return caught.value.__notes__


def test_an_error_while_a_plan_waits_names_the_stage_that_waits() -> None:
    ddp = _wrapped()
    chain(AllReduce(), halve).register(ddp)
    notes = _notes_of_a_lost_collective(ddp, 2)
    assert notes[0].startswith("raised in stage AllReduce(), bucket 0, step 2 (")


@pytest.mark.parametrize("rule", ["*.bias", "[02].*"])
def test_an_error_in_a_plan_of_route_names_the_reducer_and_its_parameters_too(rule: str) -> None:
    found: list[list[str]] = []
    for planner in (runtime.planner, lambda stage: lambda bucket: None):
        ddp = _wrapped(layers_a_bucket=1 if rule == "[02].*" else 2)
        chain(route({rule: Cast(torch.bfloat16), "*": AllReduce()})).register(ddp)
        with mock.patch.object(runtime, "planner", planner):
            found.append(_notes_of_a_lost_collective(ddp, 3))
    assert found[0] == found[1]
    reducer, part = (
        ("Cast(bfloat16, AllReduce())", "3.bias, 2.bias") if "bias" in rule else ("AllReduce()", "3.bias, 3.w")
    )
    assert found[0][0].startswith(f"raised in stage {reducer}, bucket 0, step 3 ({part}")
    assert found[0][1].startswith("raised in stage route({")


def test_an_error_in_code_of_a_plan_of_route_names_the_reducer_too() -> None:
    ddp, stage = _wrapped(), _Failing()
    stage.role = Role.REDUCER
    chain(route({"*.bias": stage, "*": AllReduce()})).register(ddp)
    for _ in range(3):
        _gradients(ddp)
    stage.fails = True
    with pytest.raises(ValueError, match="broken on purpose") as caught:
        _gradients(ddp)
    assert caught.value.__notes__[0] == "raised in stage Failing(), bucket 1, step 3 (2.bias)"


class _Seen(AllReduce):
    """Notes the buckets that it makes plans for."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []

    def plan(self, bucket: Bucket) -> Any:
        self.buckets.append(bucket)
        return super().plan(bucket)


def test_packed_parts_of_route_have_memory_in_the_pass_alone_and_the_step_of_the_pass() -> None:
    ddp, biases, weights = _wrapped(layers_a_bucket=2), _Seen(), _Seen()
    chain(route({"*.bias": biases, "*": weights})).register(ddp)
    for _ in range(4):
        _gradients(ddp)
    assert len(biases.buckets) == len(weights.buckets) == 3  # One in the first pass, then one for each plan.
    for kept in (*biases.buckets[1:], *weights.buckets[1:]):
        assert kept.step == 3 and len(kept.parameters) == 2 and kept.buffer.untyped_storage().nbytes() == 0


def test_profiles_show_plans() -> None:
    ddp = _wrapped()
    chain(AllReduce(), halve).register(ddp)
    for _ in range(2):
        _gradients(ddp)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        _gradients(ddp)
    _gradients(ddp)
    shown = {event.name for event in recorded.events()}
    assert {f"overlap::{label}[bucket 1]" for label in ("AllReduce()", "all_reduce", "halve")} <= shown
