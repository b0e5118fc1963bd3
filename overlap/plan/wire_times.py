"""Measuring what collectives cost on the link that is there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from overlap._torch.c10d import GroupChannel
from overlap._torch.device import has_streams, synchronize
from overlap.join.group_collectives import all_reduce
from overlap.plan.link import Line, Link, fit

__all__ = ["SHARING_STEPS", "measure_link", "measure_sharing"]

_SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
# The second behind a size that took this long.
_REPEATS, _FEW_REPEATS, _FEW_FROM_MS = 7, 3, 5.0
# No larger size is tried once a collective takes this long.
_LONG_MS = 60.0
_BACKGROUND_BYTES = 2**20
_LONGEST_BACKGROUND = 64
_SMALL_BYTES, _MOST_SMALL = 2**16, 32
# How often sending beside computing is measured with large tensors, once where computing takes long. It computes as
# often, once alone and once beside small ones.
_SHARING_RUNS, _LONG_COMPUTE_MS = 2, 250.0
SHARING_STEPS = 2 + _SHARING_RUNS
# Each slows the other down, but neither stands still.
_SLOWEST = 0.2

Start = Callable[[torch.Tensor], Sequence[Any]]


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Fit a line to all-reduces, and one to messages that all ranks send each other; call it on every rank.

    Issues: on ``group``, all-reduces and messages of up to 16 MB. The ranks agree on the time of each by an all-reduce
    of one number, the longest, so all of them find the same line.
    """
    channel = GroupChannel(group)
    ranks = group.size()
    if ranks == 1:
        nothing = Line(latency_ms=0.0, bytes_per_ms=float("inf"))
        return Link(ranks=1, all_reduce=nothing, messages=nothing, where="one rank")

    def all_reduce(tensor: torch.Tensor) -> Sequence[Any]:
        return channel.all_reduce(tensor, dist.ReduceOp.SUM)

    peers = [(channel.rank() + distance) % ranks for distance in range(1, ranks)]

    def messages(tensor: torch.Tensor) -> Sequence[Any]:
        parts, into = tensor.view(ranks, -1), torch.empty_like(tensor).view(ranks, -1)
        return channel.send_recv([(parts[p], p) for p in peers], [(into[p], p) for p in peers], 1)

    return Link(
        ranks=ranks,
        all_reduce=_line(all_reduce, group, device, passes=2),
        messages=_line(messages, group, device, passes=1),
        where=f"{ranks} ranks, measured",
    )


def _line(start: Start, group: dist.ProcessGroup, device: torch.device, *, passes: int) -> Line:
    points: list[tuple[int, float]] = []
    ranks = group.size()
    for nbytes in _SIZES:
        # As many elements for each rank.
        numel = nbytes // 4 // ranks * ranks
        tensor = torch.zeros(numel, device=device)
        times: list[float] = []
        repeats = _FEW_REPEATS if points and points[-1][1] > _FEW_FROM_MS else _REPEATS
        for _ in range(repeats):
            _longest(0.0, group, device)
            start_s = time.perf_counter()
            _wait(start(tensor), device)
            times.append(1e3 * (time.perf_counter() - start_s))
        # The first of a size makes connections and buffers. The least of the others would be what a link's buffer took.
        ms = _longest(statistics.median_low(times[1:]), group, device)
        points.append((passes * 4 * numel * (ranks - 1) // ranks, ms))
        if ms > _LONG_MS:
            break
    return fit(points)


def measure_sharing(link: Link, group: dist.ProcessGroup, device: torch.device, compute: Callable[[], object]) -> Link:
    """The same link with how much sending and computing slow each other down; call it on every rank.

    Args:
        compute: a forward and a backward; called at most :data:`SHARING_STEPS` times.
    """
    if link.ranks == 1:
        return link
    alone_ms = _longest(_timed(compute, device), group, device)
    share = 2 * (link.ranks - 1) / link.ranks
    one_ms = link.all_reduce.ms(_BACKGROUND_BYTES * share)
    count = max(1, min(_LONGEST_BACKGROUND, round(alone_ms / one_ms)))
    tensors = [torch.zeros(_BACKGROUND_BYTES // 4, device=device) for _ in range(count)]
    channel = GroupChannel(group)

    def send() -> list[Any]:
        return [work for tensor in tensors for work in channel.all_reduce(tensor, dist.ReduceOp.SUM)]

    found: list[tuple[float, float]] = []
    for _ in range(_SHARING_RUNS if alone_ms < _LONG_COMPUTE_MS else 1):
        _longest(0.0, group, device)
        sending_ms = _longest(_timed(lambda: _wait(send(), device), device), group, device)
        _longest(0.0, group, device)
        start_s = time.perf_counter()
        works = send()
        compute()
        if has_streams(device):
            synchronize(device)
        computed_ms = 1e3 * (time.perf_counter() - start_s)
        _wait(works, device)
        both_ms = _longest(1e3 * (time.perf_counter() - start_s), group, device)
        computed_ms = _longest(computed_ms, group, device)
        found.append(shares(alone_ms, sending_ms, computed_ms, both_ms))
    compute_rate, send_rate = (statistics.fmean(rates) for rates in zip(*found, strict=True))
    delay_ms = 0.0
    if not has_streams(device):
        small_ms = link.all_reduce.ms(_SMALL_BYTES * share)
        delay_ms = max(0.0, _beside_compute_ms(channel, group, device, compute, alone_ms, small_ms) - small_ms)
        # In the background each had its delay, too.
        send_rate = _bounded(one_ms / max(one_ms / send_rate - delay_ms, one_ms))
    return replace(link, compute_rate=compute_rate, send_rate=send_rate, delay_ms=delay_ms)


def _beside_compute_ms(
    channel: GroupChannel,
    group: dist.ProcessGroup,
    device: torch.device,
    compute: Callable[[], object],
    alone_ms: float,
    small_ms: float,
) -> float:
    """A small all-reduce, one after the other, while all ranks compute."""
    count = max(3, min(_MOST_SMALL, round(alone_ms / small_ms)))
    tensor = torch.zeros(_SMALL_BYTES // 4, device=device)
    ends_s: list[float] = []

    def send() -> None:
        for _ in range(count):
            _wait(channel.all_reduce(tensor, dist.ReduceOp.SUM), device)
            ends_s.append(time.perf_counter())

    _longest(0.0, group, device)
    with ThreadPoolExecutor(1) as pool:
        start_s = time.perf_counter()
        sending = pool.submit(send)
        compute()
        computed_s = time.perf_counter()
        sending.result()
    beside = [end_s for end_s in ends_s if end_s <= computed_s] or ends_s[:1]
    return _longest(1e3 * (beside[-1] - start_s) / len(beside), group, device)


def shares(compute_ms: float, sending_ms: float, computed_ms: float, both_ms: float) -> tuple[float, float]:
    """The speeds of computing and of sending beside each other, as shares of their speeds alone.

    Args:
        compute_ms: computing alone.
        sending_ms: sending alone.
        computed_ms: until the computation was done, where both began together.
        both_ms: until both were.

    >>> shares(100, 100, 100, 100)
    (1.0, 1.0)
    >>> shares(100, 50, 150, 150)
    (0.5, 0.5)
    """
    if both_ms > computed_ms * 1.02:
        # The link was busy to the end, and alone after the computation.
        compute_rate = compute_ms / computed_ms
        send_rate = (sending_ms - (both_ms - computed_ms)) / computed_ms
    else:
        # When sending ended is not known: computing that it cost is taken to have cost sending as much.
        lost_ms = max(0.0, computed_ms - compute_ms)
        beside_ms = sending_ms + lost_ms
        compute_rate = send_rate = 1 - lost_ms / beside_ms if lost_ms < sending_ms else 0.5
    return _bounded(compute_rate), _bounded(send_rate)


def _bounded(rate: float) -> float:
    return min(1.0, max(_SLOWEST, rate))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    start_s = time.perf_counter()
    run()
    if has_streams(device):
        synchronize(device)
    return 1e3 * (time.perf_counter() - start_s)


def _wait(works: Sequence[Any], device: torch.device) -> None:
    for work in works:
        if work is not None:
            work.wait()
    if has_streams(device):
        synchronize(device)


def _longest(ms: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The longest of all ranks, on all ranks; they leave at about the same time."""
    value = torch.tensor(ms, dtype=torch.float64, device=device)
    all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value)
