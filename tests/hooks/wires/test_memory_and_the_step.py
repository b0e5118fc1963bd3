"""A step that is not made leaves nothing in the memory of stages: all bits are as if its batch had never come."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from benchmarks.host_cost import IdleStreams
from harness import assert_parity, on_ranks
from overlap import (
    AllReduce,
    Int4,
    Int8,
    Join,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    Quantize,
    SkipNonFinite,
    Stage,
    Step,
    TopK,
    TrainingLoopError,
    chain,
    powerSGD_hook,
    route,
)
from overlap._torch.device import streams_replaced
from overlap.hooks import as_stage
from overlap.hooks.wires import StageMemory
from overlap.hooks.wires.formats import ChunkCodec

factors = functools.partial(PowerSGD, min_compression_rate=0)
STOCHASTIC = Int4(chunk=16, rounding="stochastic")
MEMORIES: dict[str, Callable[[], Stage]] = {
    "8 bits": lambda: Quantize(Int8(chunk=16), error_feedback=True),
    "4 bits, stochastic": lambda: Quantize(STOCHASTIC, error_feedback=True),
    "stochastic alone": lambda: Quantize(STOCHASTIC),
    "top-k": lambda: Quantize(TopK(0.1), error_feedback=True),
    "factors": lambda: factors(rank=1),
    "factors, alternating": lambda: factors(rank=2, alternate=True),
    "factors, by a wire": lambda: factors(rank=1, wire=STOCHASTIC),
    "factors, from step 3": lambda: factors(rank=1, start_step=3, alternate=True),
    "factors, cold": lambda: factors(rank=1, warm_start=False),
    "factors under PyTorch's name": lambda: as_stage(powerSGD_hook, PowerSGDState(None, 1, 2, 0)),
    "route": lambda: route(
        {"*.bias": AllReduce(), "0.*": factors(rank=1), "*": Quantize(STOCHASTIC, error_feedback=True)}
    ),
}
SGD = functools.partial(torch.optim.SGD, lr=0.05)
_STEPS, _BAD = 8, 4


class Run:
    """A model with `stages` and an optimizer of its own; `loss` of a batch, which is scaled in a bad one."""

    def __init__(self, rank: int, *, bucket_cap_mb: float = 1e-4, **ddp_options: Any) -> None:
        self.rank = rank
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **ddp_options)

    def loss(self, step: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)
        return (self.ddp(x) - y).square().mean() * scale

    def backward(self, step: int, scale: float = 1.0) -> None:
        self.loss(step, scale).backward()

    def parameters(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.ddp.parameters()]


Loop = Callable[[Run, Callable[[], Stage], bool], Any]


def _bad(step: int) -> bool:
    return step == _BAD


def zero_grad(run: Run, make: Callable[[], Stage], is_there: bool, *, how: str = "zero_grad") -> Any:
    """A deferred update; a bad batch is discarded."""
    stage, optimizer = make(), OverlappedOptimizer(SGD(run.ddp.parameters()))
    chain(stage, Step(optimizer, deferred=True)).register(run.ddp)
    for step in range(_STEPS):
        if not _bad(step):
            run.backward(step)
            optimizer.step()
        elif is_there:
            before = stage.state_dict()
            run.backward(step, 1e4 if run.rank else 1.0)
            assert_parity(stage.state_dict(), before, what="what is saved between backward and step()")
            if how == "zero_grad":
                optimizer.zero_grad()
                saved = overlap.state_dict(run.ddp, optimizer)["stages"]["state"].get("0", {})
                assert_parity(saved, before, what="what is saved when it was discarded")
            elif how == "zeros":
                optimizer.zero_grad(set_to_none=False)
            else:
                run.ddp.zero_grad()
    return overlap.state_dict(run.ddp, optimizer)


def accumulated(run: Run, make: Callable[[], Stage], is_there: bool) -> Any:
    """Two synchronized passes a step; both are taken back."""
    optimizer = OverlappedOptimizer(SGD(run.ddp.parameters()))
    chain(make(), Step(optimizer, deferred=True)).register(run.ddp)
    for step in range(_STEPS):
        if is_there or not _bad(step):
            run.backward(step)
            run.backward(step + _STEPS, 1e4 if _bad(step) else 1.0)
            (optimizer.zero_grad if _bad(step) else optimizer.step)()
    return overlap.state_dict(run.ddp, optimizer)


def without_update(run: Run, make: Callable[[], Stage], is_there: bool) -> Any:
    """The loop steps its own optimizer."""
    optimizer = SGD(run.ddp.parameters())
    registration = chain(make()).register(run.ddp)
    for step in range(_STEPS):
        if is_there or not _bad(step):
            optimizer.zero_grad()
            run.backward(step, 1e4 if _bad(step) else 1.0)
            (registration.discard if _bad(step) else optimizer.step)()
    return overlap.state_dict(run.ddp, optimizer)


def scaler(run: Run, make: Callable[[], Stage], is_there: bool, *, has_update: bool = True) -> Any:
    """GradScaler skips the bad batch; with a scale that never changes."""
    optimizer: Any = SGD(run.ddp.parameters())
    if has_update:
        optimizer = OverlappedOptimizer(optimizer)
        chain(make(), Step(optimizer, deferred=True)).register(run.ddp)
    else:
        chain(make()).register(run.ddp)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=4.0, growth_factor=1 + 1e-9, backoff_factor=1 - 1e-9
    )  # Rounds to 4.
    for step in range(_STEPS):
        if is_there or not _bad(step):
            optimizer.zero_grad()
            scaler.scale(run.loss(step, float("inf") if _bad(step) and run.rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    return overlap.state_dict(run.ddp, optimizer)


def skipped(run: Run, make: Callable[[], Stage], is_there: bool, *, form: str = "interleaved") -> Any:
    """SkipNonFinite."""
    optimizer: Any = SGD(run.ddp.parameters())
    if "automatic" not in form:
        optimizer = OverlappedOptimizer(optimizer)
    chain(make(), SkipNonFinite(), Step(optimizer, deferred="deferred" in form)).register(run.ddp)
    for step in range(_STEPS):
        if is_there or not _bad(step):
            run.backward(step, float("inf") if _bad(step) and run.rank else 1.0)
            if "automatic" not in form:
                optimizer.step()
    return overlap.state_dict(run.ddp, optimizer)


def failed(run: Run, make: Callable[[], Stage], is_there: bool) -> Any:
    """A stage raises in the bad batch, in its last bucket, on every rank."""
    optimizer = OverlappedOptimizer(SGD(run.ddp.parameters()))
    is_broken = False

    def fail(bucket: overlap.Bucket) -> None:
        if is_broken and bucket.is_last:
            raise ArithmeticError("this batch")

    chain(make(), fail, Step(optimizer, deferred=True)).register(run.ddp)
    for step in range(_STEPS):
        if not _bad(step):
            run.backward(step)
            optimizer.step()
        elif is_there:
            is_broken = True
            with pytest.raises((ArithmeticError, overlap.errors.PeerError)):
                run.backward(step)
            is_broken = False
    return overlap.state_dict(run.ddp, optimizer)


def skip_update(run: Run, make: Callable[[], Stage], is_there: bool) -> Any:
    """A backward that is not this optimizer's, of an interleaved update."""
    optimizer = OverlappedOptimizer(SGD(run.ddp.parameters()))
    chain(make(), Step(optimizer)).register(run.ddp)
    for step in range(_STEPS):
        if not _bad(step):
            run.backward(step)
            optimizer.step()
        elif is_there:
            with optimizer.skip_update():
                run.backward(step, 1e4)
            optimizer.zero_grad()
    return overlap.state_dict(run.ddp, optimizer)


def local(run: Run, make: Callable[[], Stage], is_there: bool) -> Any:
    """As the reducer of LocalSGD before its start, whose averages after it have a memory of their own."""
    averages = LocalSGD(
        run.ddp,
        SGD(run.ddp.parameters()),
        period=2,
        start_step=_BAD + 2,
        reducer=make(),
        wire=STOCHASTIC,
        error_feedback=True,
    )
    for step in range(_STEPS + 2):
        if is_there or step not in (_BAD, _STEPS):  # The second is in a round.
            run.backward(step, 1e4 if step in (_BAD, _STEPS) else 1.0)
            (averages.zero_grad if step in (_BAD, _STEPS) else averages.step)()
            averages.zero_grad()
    return overlap.state_dict(run.ddp, averages)


LOOPS: dict[str, Loop] = {
    "zero_grad()": zero_grad,
    "zero_grad(set_to_none=False)": functools.partial(zero_grad, how="zeros"),
    "ddp.zero_grad()": functools.partial(zero_grad, how="ddp"),
    "two passes a step": accumulated,
    "registration.discard()": without_update,
    "GradScaler": scaler,
    "GradScaler of the loop's own optimizer": functools.partial(scaler, has_update=False),
    "SkipNonFinite": skipped,
    "SkipNonFinite, deferred": functools.partial(skipped, form="deferred"),
    "SkipNonFinite, automatic": functools.partial(skipped, form="automatic"),
    "a failed pass": failed,
    "skip_update()": skip_update,
    "LocalSGD": local,
}
IN_ALL = ["zero_grad()", "two passes a step", "registration.discard()"]
"""The loops that every memory is played in."""


SOME = ["4 bits, stochastic", "factors, alternating", "route"]


def _as_if_never_there(rank: int, loops: Sequence[str], memories: Sequence[str]) -> None:
    for loop, memory in itertools.product(loops, memories):
        there, never = (LOOPS[loop](Run(rank), MEMORIES[memory], is_there) for is_there in (True, False))
        assert_parity(there, never, what=f"{loop}, {memory}")


@on_ranks(2, timeout_s=120)
def test_all_bits_of_each_memory_are_as_if_the_batch_had_never_come(rank: int, world_size: int) -> None:
    _as_if_never_there(rank, IN_ALL, list(MEMORIES))


@on_ranks(2, timeout_s=120)
def test_and_in_each_loop(rank: int, world_size: int) -> None:
    _as_if_never_there(rank, [loop for loop in LOOPS if loop not in IN_ALL], SOME)


@on_ranks(3)
def test_and_on_three_ranks(rank: int, world_size: int) -> None:
    _as_if_never_there(rank, ["zero_grad()"], SOME)


@on_ranks(2)
def test_of_several_optimizers_each_has_its_parameters_memory(rank: int, world_size: int) -> None:
    """Of two optimizers of a chain one is discarded: its parameters' memory is taken back, the other's stays."""
    for memory in ("8 bits", "factors"):
        results = []
        for is_discarded in (False, True):
            run, stage = Run(rank, bucket_cap_mb=25), MEMORIES[memory]()
            layers = run.ddp.module[0], run.ddp.module[2]
            first, second = (OverlappedOptimizer(SGD(layer.parameters())) for layer in layers)
            chain(stage, Step(first, deferred=True), Step(second, deferred=True)).register(run.ddp)
            states = []
            for step in range(_STEPS):
                run.backward(step)
                first.step()
                (second.zero_grad if is_discarded and step == _STEPS - 1 else second.step)()
                states.append(stage.state_dict())
            results.append(states)
        kept, taken = ({**one[-1].get("error", {}), **one[-1].get("residuals", {})} for one in results)
        before = {**results[1][-2].get("error", {}), **results[1][-2].get("residuals", {})}
        assert kept and any(name.startswith("2.") for name in kept)
        for name in kept:
            assert torch.equal(taken[name], (before if name.startswith("2.") else kept)[name]), (memory, name)
            assert not torch.equal(kept[name], before[name]), (memory, name)


@on_ranks(2)
def test_a_run_resumes_right_after_a_step_that_was_not_made(rank: int, world_size: int) -> None:
    """A state that is saved right after a step was discarded; both runs save it, and the other loads it, too."""
    for memory, make in MEMORIES.items():
        ends = []
        for is_resumed in (False, True):
            run, at = Run(rank), range(_STEPS)
            optimizer = OverlappedOptimizer(SGD(run.ddp.parameters()))
            registration = chain(make(), Step(optimizer, deferred=True)).register(run.ddp)
            for step in at:
                run.backward(step, 1e4 if _bad(step) else 1.0)
                (optimizer.zero_grad if _bad(step) else optimizer.step)()
                if _bad(step) and is_resumed:
                    state = overlap.state_dict(run.ddp, optimizer)
                    registration.remove()
                    optimizer = OverlappedOptimizer(SGD(run.ddp.parameters()))
                    chain(make(), Step(optimizer, deferred=True)).register(run.ddp)
                    overlap.load_state_dict(run.ddp, optimizer, state)
            ends.append(overlap.state_dict(run.ddp, optimizer))
        assert_parity(ends[1], ends[0], what=memory)


@on_ranks(2)
def test_removing_between_backward_and_the_step_and_what_cannot_be_discarded(rank: int, world_size: int) -> None:
    run, stage = Run(rank), MEMORIES["8 bits"]()
    optimizer = OverlappedOptimizer(SGD(run.ddp.parameters()))
    registration = chain(stage, Step(optimizer, deferred=True)).register(run.ddp)
    run.backward(0)
    with pytest.raises(TrainingLoopError, match=r"call zero_grad\(\) of its optimizer in place of step\(\)"):
        registration.discard()
    optimizer.step()
    before = stage.state_dict()
    run.backward(1)
    registration.remove()  # Its step was not made.
    assert_parity(stage.state_dict(), before, what="removed before the step")
    run.ddp.zero_grad()
    registration = chain(stage).register(run.ddp)
    with Join([run.ddp]), pytest.raises(TrainingLoopError, match=r"registration.discard\(\): under Join"):
        registration.discard()
    run.backward(1)
    after = stage.state_dict()
    registration.remove()  # The loop has made its own.
    assert_parity(stage.state_dict(), after, what="removed without an update")
    with pytest.raises(AssertionError):
        assert_parity(after, before, what="the pass")


@on_ranks(2)
def test_an_average_that_fails_or_is_not_finite_changes_no_memory(rank: int, world_size: int) -> None:
    """An average that fails, or is not finite, changes no memory of its wire."""
    run = Run(rank)
    averages = LocalSGD(
        run.ddp, SGD(run.ddp.parameters()), period=1, start_step=0, wire=STOCHASTIC, error_feedback=True
    )

    def train(step: int) -> None:
        run.backward(step)
        averages.step()
        averages.zero_grad()

    train(0)
    memory = averages.averager.wire.memory  # type: ignore[union-attr]
    before, intact = memory.state_dict(), ChunkCodec.read

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("the codec broke")

    ChunkCodec.read = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the codec broke"):
        train(1)
    ChunkCodec.read = intact  # type: ignore[method-assign]
    assert_parity(memory.state_dict(), before, what="after an average that failed")
    if rank == 0:
        with torch.no_grad():
            run.ddp.module[0].weight[0, 0] = torch.inf
    train(2)
    assert_parity(memory.state_dict(), before, what="after an average that is not finite")


@pytest.mark.parametrize("is_bad", [True, False])
@pytest.mark.parametrize("layout", ["the same views", "other views", "loaded", "a new one", "of another update"])
def test_on_a_device_a_mask_takes_back(layout: str, is_bad: bool) -> None:
    def errors(start: float) -> list[torch.Tensor]:
        flat = torch.arange(start, start + 6)
        return list(reversed(flat.split(3))) if layout == "other views" and start > 1 else list(flat.split(3))

    with streams_replaced(IdleStreams()):
        memory = StageMemory("a stage", error_feedback=True, wire=None)
        before, after = [one.clone() for one in errors(1.0)], [one.clone() for one in errors(11.0)]
        memory.put(["a", "b"], errors(1.0))
        memory.commit()
        if layout == "loaded":
            memory.load_state_dict(memory.state_dict())
        if layout == "a new one":
            memory.load_state_dict({"error": {"a": before[0]}})
            before[1] = torch.zeros(3)
        memory.put(["a", "b"], errors(11.0))
        others = ("b",) if layout == "of another update" else ()
        memory.discard(torch.tensor(is_bad), others)
        memory.commit(others)
        expected = before if is_bad else after
        if others:
            expected = [expected[0], after[1]]
        assert all(torch.equal(memory.get(name), one) for name, one in zip("ab", expected, strict=True))  # type: ignore[arg-type]
