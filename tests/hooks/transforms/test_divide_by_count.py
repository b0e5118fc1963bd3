"""`DivideByCount` beside one process on the union of all batches, in which every token has the same weight."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.host_cost import IdleStreams
from harness import assert_equal_ranks, on_ranks, wrap
from harness.models import MLP
from harness.streams import one_process
from overlap import (
    AllReduce,
    Cast,
    ClipGradNorm,
    ConfigurationError,
    DivideByCount,
    Int4,
    Int8,
    Join,
    Log,
    NoReduction,
    OverlappedOptimizer,
    PeerError,
    PostLocal,
    PostLocalSGDState,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_hook,
    as_stage,
    chain,
    register,
    route,
)
from overlap._torch.device import DeviceStreams, streams_replaced
from overlap.hooks.engine import runtime

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TOKENS = ((3, 50, 200), (200, 3, 50), (0, 7, 0), (50, 200, 3))
"""By step, of each rank."""
CLIPS_AT = 0.05

Batch = tuple[Tensor, Tensor]


def _batch(step: int, rank: int, tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(tokens, 16, generator=generator), torch.randn(tokens, 16, generator=generator)


def _summed(model: nn.Module, batch: Batch, scale: float = 1.0) -> Tensor:
    loss: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum") * scale
    return loss


def _ddp(**options: Any) -> Any:
    return wrap(MLP.model(), **{**MLP.ddp_options(), **options})


def _values(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class OneProcess:
    """Trains on the union of batches."""

    def __init__(self, *, clips: bool = False) -> None:
        self.model = copy.deepcopy(MLP.model())
        self.optimizer = SGD(self.model.parameters())
        self._clips = clips

    def gradients(self, batches: Sequence[Batch]) -> list[Tensor]:
        self.optimizer.zero_grad()
        union = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        _summed(self.model, union, 1 / len(union[0])).backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]  # type: ignore[union-attr]

    def step(self, batches: Sequence[Batch]) -> None:
        self.gradients(batches)
        if self._clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIPS_AT)
        self.optimizer.step()

    def compare(self, ddp: Any, what: str) -> None:
        for ours, theirs in zip(ddp.module.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


def _stepped(*stages: Any, **options: Any) -> Callable[[DivideByCount, Any], Any]:
    def build(by_count: DivideByCount, ddp: Any) -> Any:
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(by_count, *(stage() for stage in stages), Step(optimizer, **options)).register(ddp)
        return optimizer

    return build


def _sharded(*stages: Any, **options: Any) -> Callable[[DivideByCount, Any], Any]:
    def build(by_count: DivideByCount, ddp: Any) -> Any:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        chain(by_count, *(stage() for stage in stages), ZeroStep(zero, **options)).register(ddp)
        return zero

    return build


def _two(by_count: DivideByCount, ddp: Any) -> Any:
    halves = [OverlappedOptimizer(SGD(part)) for part in (list(ddp.parameters())[:4], list(ddp.parameters())[4:])]
    chain(by_count, AllReduce(), *map(Step, halves)).register(ddp)
    return mock.Mock(step=lambda: [half.step() for half in halves])


def _reduced(by_count: DivideByCount, ddp: Any) -> Any:
    chain(by_count, AllReduce()).register(ddp)
    optimizer = SGD(ddp.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return mock.Mock(step=step)


def _clip() -> ClipGradNorm:
    return ClipGradNorm(CLIPS_AT)


def _torch_hook() -> Any:
    return as_stage(default_hooks.allreduce_hook)


EXACT: dict[str, Callable[[DivideByCount, Any], Any]] = {
    "a plain optimizer": _reduced,
    "in backward": _stepped(AllReduce),
    "released": _stepped(AllReduce, release_gradients=True),
    "deferred": _stepped(AllReduce, deferred=True),
    "PyTorch's own hook": _stepped(_torch_hook),
    "routed": _stepped(lambda: route({"*.bias": AllReduce(), "*": Cast(torch.float64)})),
    "clipped": _stepped(AllReduce, _clip),
    "sharded": _sharded(),
    "sharded, clipped": _sharded(AllReduce, _clip),
    "sharded, in the next forward": _sharded(gather="forward"),
    "two updates": _two,
}


@on_ranks(3, timeout_s=120)
def test_uneven_batches_are_trained_as_by_one_process_on_their_union(rank: int, world_size: int) -> None:
    for name, build in EXACT.items():
        ddp = _ddp(gradient_as_bucket_view=name == "released")
        by_count, reference = DivideByCount(), OneProcess(clips="clipped" in name)
        optimizer = build(by_count, ddp)
        for step, tokens in enumerate(TOKENS):
            # A number, or a tensor of any dtype.
            by_count.count([tokens[rank], torch.tensor(tokens[rank]), torch.tensor(float(tokens[rank]))][step % 3])
            _summed(ddp, _batch(step, rank, tokens[rank])).backward()
            optimizer.step()
            reference.step([_batch(step, each, tokens[each]) for each in range(world_size)])
        if name == "sharded, in the next forward":
            optimizer.wait()
        reference.compare(ddp, name)
        assert_equal_ranks(ddp.parameters(), name)


ROUNDED: dict[str, tuple[Callable[[], Any], float]] = {
    # Of the largest number of a message at most so much is lost, by each of the ranks and with the sum.
    "8 bits": (lambda: Quantize(Int8()), 1 / 127),
    "16 bits": (lambda: Cast(torch.bfloat16), 1 / 256),
    "4 bits, feedback": (lambda: Quantize(Int4(), error_feedback=True), 1 / 7),
    "factors": (lambda: PowerSGD(rank=16, min_compression_rate=0.1), 1e-5),
}


@on_ranks(3)
def test_what_rounds_loses_no_more_than_its_bound(rank: int, world_size: int) -> None:
    for name, (reducer, loses) in ROUNDED.items():
        ddp, by_count, reference = _ddp(), DivideByCount(), OneProcess()
        chain(by_count, reducer()).register(ddp)
        total: list[Tensor] = []
        for step in range(8):
            tokens = TOKENS[step % 2]
            ddp.zero_grad()
            by_count.count(tokens[rank])
            _summed(ddp, _batch(step, rank, tokens[rank])).backward()
            exact = reference.gradients([_batch(step, each, tokens[each]) for each in range(world_size)])
            most = 2 * world_size * loses * max(float(gradient.abs().max()) for gradient in exact)
            errors = [p.grad - one for p, one in zip(ddp.parameters(), exact, strict=True)]
            # What feedback has kept of one step is delivered in the next, in the unit of a mean: with other counts it
            # would be multiplied by as much as 67, and the sum of all steps would not be within one step's error.
            total = errors if not total else [one + other for one, other in zip(total, errors, strict=True)]
            for error in total if "feedback" in name else errors:
                assert float(error.abs().max()) <= most, (name, step, float(error.abs().max()), most)


def _window(
    ddp: Any,
    by_count: DivideByCount,
    rank: int,
    steps: Sequence[int],
    *,
    synchronizes: bool = True,
    counts: bool = True,
) -> None:
    """Microbatches, of which the last one synchronizes."""
    for step in steps:
        with nullcontext() if synchronizes and step == steps[-1] else ddp.no_sync():
            loss = _summed(ddp, _batch(step, rank, TOKENS[step % 4][rank]))
            if counts:
                by_count.count(TOKENS[step % 4][rank])
            loss.backward()


def _union(steps: Sequence[int], ranks: int) -> list[Batch]:
    return [_batch(step, rank, TOKENS[step % 4][rank]) for step in steps for rank in range(ranks)]


def _accumulates(ddp: Any, by_count: DivideByCount, optimizer: Any, rank: int) -> Iterator[Sequence[int]]:
    _window(ddp, by_count, rank, range(4))
    optimizer.step()
    yield range(4)
    by_count.count(sum(TOKENS[step % 4][rank] for step in range(4, 7)))  # Of all microbatches at once.
    _window(ddp, by_count, rank, range(4, 7), counts=False)
    optimizer.step()
    yield range(4, 7)
    # A window that the loop discards, in each way, leaves nothing.
    for place, clear in enumerate((optimizer.zero_grad, ddp.zero_grad, lambda: optimizer.zero_grad(set_to_none=False))):
        _window(ddp, by_count, rank, range(2), synchronizes=False)
        by_count.count(TOKENS[3][rank])  # Of the next batch.
        clear()
        _window(ddp, by_count, rank, [3], counts=False)
        optimizer.step()
        yield [3]
        _window(ddp, by_count, rank, range(place, 2 + place))
        optimizer.step()
        yield range(place, 2 + place)


def _penalizes(ddp: Any, by_count: DivideByCount, optimizer: Any, rank: int) -> Iterator[Sequence[int]]:
    """A gradient of the output that goes to no parameter is not the backward of a count."""
    for step in range(4):
        x, y = _batch(step, rank, TOKENS[step][rank])
        with nullcontext() if step % 2 else ddp.no_sync():
            by_count.count(len(x))
            output = ddp(x.requires_grad_())
            torch.autograd.grad(output.sum(), x, retain_graph=True)
            nn.functional.mse_loss(output, y, reduction="sum").backward()
        if step % 2:
            optimizer.step()
            yield [step - 1, step]


def _discards(ddp: Any, by_count: DivideByCount, optimizer: Any, rank: int) -> Iterator[Sequence[int]]:
    for step in range(4):
        _window(ddp, by_count, rank, [step])
        optimizer.zero_grad()  # In place of step().
        _window(ddp, by_count, rank, [step + 1])
        optimizer.step()
        yield [step + 1]


def _scales(ddp: Any, by_count: DivideByCount, optimizer: Any, rank: int) -> Iterator[Sequence[int]]:
    """A scaler, which skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        for factor in (float("inf"), 1.0) if step == 1 else (1.0,):
            by_count.count(TOKENS[step][rank])
            scaler.scale(_summed(ddp, _batch(step, rank, TOKENS[step][rank]), factor)).backward()
            scaler.step(optimizer)
            scaler.update()
        yield [step]


@on_ranks(3, timeout_s=120)
def test_accumulated_and_discarded_batches_count_with_their_gradients(rank: int, world_size: int) -> None:
    for play, builds in (
        (_accumulates, (_stepped(AllReduce), _stepped(AllReduce, deferred=True), _sharded())),
        (_penalizes, (_reduced, _stepped(AllReduce))),
        (_discards, (_stepped(AllReduce, deferred=True), _sharded(deferred=True))),
        (_scales, (_stepped(AllReduce, deferred=True), _sharded(deferred=True))),
    ):
        for place, build in enumerate(builds):
            ddp, by_count, reference = _ddp(), DivideByCount(), OneProcess()
            for steps in play(ddp, by_count, build(by_count, ddp), rank):
                reference.step(_union(steps, world_size))
                reference.compare(ddp, f"{play.__name__}, {place}, {steps}")
            assert_equal_ranks(ddp.parameters(), f"{play.__name__}, {place}")


@on_ranks(3, timeout_s=120)
def test_under_join_a_rank_that_has_run_out_counts_nothing(rank: int, world_size: int) -> None:
    """Ranks have 3, 6 and 2 microbatches: with two a step, the first one runs out between two."""
    numbers = (3, 6, 2)
    for build in (
        _stepped(AllReduce),
        _stepped(AllReduce, deferred=True),
        _sharded(),
    ):
        for divides in (True, False):
            ddp, by_count, reference = _ddp(), DivideByCount(), OneProcess()
            optimizer = build(by_count, ddp)
            with Join([ddp, optimizer], divide_by_initial_world_size=divides) as join:
                for step in join.iterate(range(numbers[rank])):
                    with nullcontext() if step % 2 else ddp.no_sync():
                        by_count.count(TOKENS[step % 4][rank])
                        _summed(ddp, _batch(step, rank, TOKENS[step % 4][rank])).backward()
                    if step % 2:
                        optimizer.step()
            for step in (0, 2, 4):
                reference.step(
                    [
                        _batch(each, of, TOKENS[each % 4][of])
                        for of in range(world_size)
                        for each in (step, step + 1)
                        if each < numbers[of]
                    ]
                )
            reference.compare(ddp, f"{optimizer!r}, {divides=}")


WRONG_COUNTS: list[tuple[Any, str]] = [
    (-2, r"rank 1 counts -2: .*at least 0"),
    (float("nan"), r"rank 1 counts nan"),
    (torch.tensor(float("inf")), r"rank 1 counts tensor\(inf\)"),
    (torch.ones(2), r"rank 1 counts a tensor of shape \(2,\), which is not a number: .*mask\.sum\(\)"),
    ("3", r"rank 1 counts '3', which is not a number"),
    (torch.tensor(True), r"rank 1 counts tensor\(True\)"),
]


@on_ranks(3, timeout_s=120)
def test_counts_that_cannot_be_right_are_refused_alike_on_all_ranks(rank: int, world_size: int) -> None:
    ddp, by_count = _ddp(), DivideByCount()
    optimizer = _stepped(AllReduce, deferred=True)(by_count, ddp)
    kept = _values(ddp)

    def backward(count: Any = 1) -> None:
        if count is not None:
            by_count.count(count)
        _summed(ddp, _batch(0, rank, 4)).backward()

    # No count on one rank: it names itself, and the others are told.
    words = "rank 1 has no count for this backward: call by_count.count"
    with pytest.raises(TrainingLoopError if rank == 1 else PeerError, match=words):
        backward(None if rank == 1 else 1)
    # Nothing was counted on any rank.
    words = rf"the counts of all 3 ranks add up to 0 \(rank {rank} counts 0\)"
    with pytest.raises(TrainingLoopError, match=words):
        backward(0)
    for wrong, words in WRONG_COUNTS:
        backward()
        optimizer.zero_grad()
        if rank == 1:
            with pytest.raises(ConfigurationError, match=words):
                backward(wrong)
            continue
        with pytest.raises(PeerError, match=r"rank 1.*counts"):
            backward()
    assert all(map(torch.equal, kept, _values(ddp)))
    # A count is used once; then everything works as if nothing had been refused.
    backward()
    optimizer.step()
    with pytest.raises(TrainingLoopError, match=rf"rank {rank} has no count"):
        backward(None)
    with ddp.no_sync():
        backward(8)  # Of this microbatch and of one that does not come: the loop discards them.
    ddp.zero_grad()
    with pytest.raises(TrainingLoopError, match=rf"rank {rank} has no count"):
        backward(None)
    backward(4)
    reference = OneProcess()
    reference.model.load_state_dict(ddp.module.state_dict())
    expected = reference.gradients([_batch(0, each, 4) for each in range(world_size)])
    for parameter, gradient in zip(ddp.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6)
    with pytest.raises(TrainingLoopError, match="a second backward began before"):
        backward(4)


def _local(ddp: Any) -> Any:
    return PostLocal(PostLocalSGDState(None, None, start_localSGD_iter=2))


@on_ranks(1)
def test_where_it_cannot_stand_it_is_refused(rank: int, world_size: int) -> None:
    ddp = _ddp()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: chain(AllReduce(), DivideByCount()), "in place of the reducer, and stands after it: write chain"),
        (lambda: chain(DivideByCount(), DivideByCount(), AllReduce()), "stands twice"),
        (lambda: chain(DivideByCount(), NoReduction()), r"NoReduction\(\) does not take the mean over all of them"),
        (lambda: chain(DivideByCount(), _local(ddp)), "does not take the mean over all of them"),
        (lambda: chain(Cast(torch.float64, chain(DivideByCount(), AllReduce()))), "inside of another stage"),
    ]
    for make, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            make().register(ddp)
    with pytest.raises(ConfigurationError, match=r"call it after chain\(DivideByCount\(\)"):
        DivideByCount().count(1)
    hooked = _ddp()
    hooked.register_comm_hook(None, as_hook(chain(DivideByCount(), AllReduce())))
    with pytest.raises(ConfigurationError, match=r"register the chain with overlap\.register"):
        _summed(hooked, _batch(0, 0, 4)).backward()


@pytest.fixture(params=["streams", "a thread"])
def one_rank(request: pytest.FixtureRequest) -> Iterator[str]:
    """This process stands for two ranks."""
    with one_process(2), streams_replaced(IdleStreams() if request.param == "streams" else DeviceStreams()):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_plans_and_coroutines_divide_alike(one_rank: str, dtype: torch.dtype) -> None:
    def played() -> list[Tensor]:
        torch.manual_seed(0)
        ddp = wrap(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).to(dtype), bucket_cap_mb=300 / 2**20)
        by_count = DivideByCount()
        norms: list[Any] = []
        registered = register(ddp, chain(Log(lambda step, found: norms.append(found)), by_count, AllReduce()))
        found = []
        for count in (1, 2.5, torch.tensor(150_000), 300_000):  # The reciprocal of the last two is no fp16 number.
            ddp.zero_grad()
            by_count.count(count)
            ddp(torch.ones(4, 8, dtype=dtype)).square().sum().backward()
            loss = ddp.module(torch.ones(4, 8, dtype=dtype)).square().sum()
            for parameter, own in zip(ddp.parameters(), torch.autograd.grad(loss, list(ddp.parameters())), strict=True):
                part = own * (1 / float(2 * count))
                assert torch.equal(parameter.grad, part + part)
            found += [parameter.grad.clone() for parameter in ddp.parameters()]
        assert registered.is_active and len(norms) == 4
        return found

    planned = played()
    with mock.patch.object(runtime, "planner", return_value=lambda bucket: None):
        assert all(map(torch.equal, planned, played()))


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf"), 0])
def test_a_wrong_count_on_an_accelerator_is_skipped(count: float) -> None:
    """No host may look at it: gradients are not finite on any rank."""
    with one_process(2), streams_replaced(IdleStreams()):
        ddp, by_count, skip = _ddp(), DivideByCount(), SkipNonFinite()
        optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), fused=True))
        chain(by_count, AllReduce(), skip, Step(optimizer)).register(ddp)
        kept = _values(ddp)
        by_count.count(torch.tensor(3.0))
        by_count.count(torch.tensor(count) if count else torch.tensor(-3.0) * 0)
        if not count:
            by_count._new = torch.tensor(0.0, dtype=torch.float64)
        _summed(ddp, _batch(0, 0, 4)).backward()
        optimizer.step()
        assert skip.skipped == 1 and all(map(torch.equal, kept, _values(ddp)))
