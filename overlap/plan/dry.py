"""What a reducer computes and sends, found out by running it on buckets of random numbers without sending anything.

The stage runs as the engine runs it, up to each collective. That is given to a channel which counts the bytes and does
nothing, for as many ranks as are asked for: so one process can measure what a stage costs among a thousand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import has_streams, synchronize
from overlap.hooks import Bucket, Stage, StageContext
from overlap.hooks.collectives import Operation
from overlap.plan.candidates import Method
from overlap.plan.profile import ParameterTimes

__all__ = ["BucketCost", "Costs", "Layout", "dry_run", "measured_costs"]

Layout = tuple[tuple[ParameterTimes, ...], ...]

_NUMBERS = 65521
# The first makes buffers, and the residuals of error feedback.
_RUNS = 2


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """A bucket's way through a reducer."""

    before_ms: tuple[float, ...]
    """What is computed before each collective."""
    kinds: tuple[str, ...]
    sent_bytes: tuple[int, ...]
    after_ms: float
    """What is computed after the last one."""


Costs = Callable[[Method, Layout], Sequence[BucketCost]]
"""What the reducer of a method costs for each bucket of a layout."""


def measured_costs(ranks: int, device: torch.device | None = None, *, runs: int = _RUNS) -> Costs:
    """Costs that are measured when they are first asked for."""

    @cache
    def of(method: Method, layout: Layout) -> Sequence[BucketCost]:
        assert method.reducer is not None, f"{method.name} has no reducer"
        return dry_run(method.reducer(), layout, ranks=ranks, device=device, runs=runs)

    return of


def dry_run(
    stage: Stage,
    layout: Sequence[Sequence[ParameterTimes]],
    *,
    ranks: int,
    device: torch.device | None = None,
    runs: int = _RUNS,
) -> tuple[BucketCost, ...]:
    """What ``stage``, a reducer, costs for each bucket of ``layout`` among so many ranks. Draws random numbers."""
    device = device or torch.device("cpu")
    group: Any = _Group(ranks)
    buckets = _buckets(layout, group, device)
    names = {
        parameter: name for bucket in buckets for parameter, name in zip(bucket.parameters, bucket.names, strict=True)
    }
    stage.attach(StageContext(group=group, device=device, names=names, finds_unused=False, background=_nothing))
    found = []
    try:
        for _ in range(runs):
            stage.before_backward(is_replay=False)
            found.append([_cost(stage, bucket, group, device) for bucket in buckets])
            stage.after_backward(failed=False)
    finally:
        stage.detach()
    return tuple(_typical(of_bucket) for of_bucket in zip(*found[min(1, runs - 1) :], strict=True))


def _cost(stage: Stage, bucket: Bucket, group: _Group, device: torch.device) -> BucketCost:
    _fill(bucket.buffer)
    kinds, sent, marks_ms = [], [], []
    coroutine: Any = stage(bucket)
    value: Any = None
    while True:
        start_s = _now_s(device)
        try:
            operation: Operation = coroutine.send(value)
        except StopIteration:
            marks_ms.append(1e3 * (_now_s(device) - start_s))
            break
        marks_ms.append(1e3 * (_now_s(device) - start_s))
        operation.launch(group)
        # What the stage does with the result when it is there counts as computing after it.
        finish_s = _now_s(device)
        value = operation.finish(lambda work: None)
        extra_ms = 1e3 * (_now_s(device) - finish_s)
        kinds.append(operation.label)
        sent.append(operation.sent_bytes)
        marks_ms[-1] += extra_ms
    *before_ms, after_ms = marks_ms
    return BucketCost(before_ms=tuple(before_ms), kinds=tuple(kinds), sent_bytes=tuple(sent), after_ms=after_ms)


def _fill(buffer: Tensor) -> None:
    """With numbers like gradients'. To draw each would take longer than what is to be measured; a prime number of them,
    over and over, makes matrices of full rank, too."""
    few = torch.randn(_NUMBERS, device=buffer.device, dtype=torch.float32).mul_(1e-3).to(buffer.dtype)
    whole = buffer.numel() // _NUMBERS * _NUMBERS
    buffer[:whole].view(-1, _NUMBERS).copy_(few.expand(whole // _NUMBERS, -1))
    buffer[whole:].copy_(few[: buffer.numel() - whole])


def _typical(costs: Sequence[BucketCost]) -> BucketCost:
    """The median of what was measured several times; of two the smaller, since what disturbs only adds."""
    middle = statistics.median_low
    return BucketCost(
        before_ms=tuple(middle(times) for times in zip(*(one.before_ms for one in costs), strict=True)),
        kinds=costs[-1].kinds,
        sent_bytes=costs[-1].sent_bytes,
        after_ms=middle(one.after_ms for one in costs),
    )


def _buckets(layout: Sequence[Sequence[ParameterTimes]], group: Any, device: torch.device) -> list[Bucket]:
    made = []
    for index, own in enumerate(layout):
        parameters = tuple(torch.empty(one.shape, dtype=one.torch_dtype, device=device) for one in own)
        views, offset = [], 0
        for parameter in parameters:
            views.append((parameter.size(), parameter.stride(), offset))
            offset += parameter.numel()
        made.append(
            Bucket(
                index=index,
                is_last=index == len(layout) - 1,
                buffer=torch.empty(offset, dtype=own[0].torch_dtype, device=device),
                parameters=parameters,
                group=group,
                divisor=group.size(),
                step=1,
                fqns=tuple(one.name for one in own),
                views=tuple(views),
            )
        )
    return made


class _Group:
    """Has the rank and the size of a process group, and gives channels that send nothing."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tag = 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._ranks

    def name(self) -> str:
        return "dry"

    # As the engine's channels.

    def of(self, group: Any) -> Any:
        return self

    def next_tag(self) -> int:
        self._tag += 1
        return self._tag

    # As a channel.

    scatters_by_messages = True

    def all_reduce(self, tensor: Tensor, op: Any) -> Sequence[Any]:
        return ()

    def all_gather(self, output: Tensor, input: Tensor) -> Sequence[Any]:
        return ()

    def broadcast(self, tensor: Tensor, src: int) -> Sequence[Any]:
        return ()

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Sequence[Any]:
        return ()

    def send_recv(self, sends: Any, receives: Any, tag: int) -> Sequence[Any]:
        # Uninitialized memory may hold NaN.
        for tensor, _ in receives:
            tensor.zero_()
        return ()


def _nothing(items: Any, work: Any, *, on_failure: Any) -> None:
    raise AssertionError("a reducer has no work between passes")


def _now_s(device: torch.device) -> float:
    if has_streams(device):
        synchronize(device)
    return time.perf_counter()
