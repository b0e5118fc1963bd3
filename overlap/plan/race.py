"""Real steps of each method beside plain DDP, on copies, by turns; and then of the fastest, for as long again.

[Note: the race]

A candidate is built on a copy of the model, next to a copy with the baseline, plain DDP. In a round each of the two
takes some steps, all ranks starting together; the ratio of the two times is one measurement, in which most of the noise
of a shared machine cancels. All candidates share half of the time for such rounds, and the fastest has the other half
for rounds that decide. So at most two copies exist at a time, and the rounds that decide are not those by which the
fastest was selected.

All ranks do the same in the same order: after each thing that can fail (building, a step, a round) they agree on how it
went. A rank on which a candidate raises a ConfigurationError or runs out of memory closes the connections, so that the
others do not wait for it; the candidate is refused on all, and the next one gets new connections.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from tqdm import tqdm

from overlap._torch.c10d import abandon_group, has_lost_connection
from overlap._torch.device import current_stream, has_streams
from overlap._torch.optimizer import drop_hooks
from overlap.errors import CollectiveError, ConfigurationError, OverlapError, UnsupportedError
from overlap.hooks.engine.registration import registration_of
from overlap.plan.candidates import METHODS, PLAIN, build
from overlap.ranks.board import Agreement, group_all_reduce
from overlap.ranks.machines import forget, own_subgroup

# DDP rebuilds its buckets after the first step, and the second may allocate. Where steps are long that is a small part.
_WARMUP_STEPS, _LONG_MS = 2, 500.0
# A sample is at least this long, so that the clock and the scheduler add little.
_SAMPLE_MS = 40.0
# Fewer rounds cannot show that a candidate is faster: see `is_surely_faster`. More show no more.
FEWEST_ROUNDS, _MOST_ROUNDS = 5, 200
# Of collectives: only of use where a rank hangs, since one that fails closes its connections.
_TIMEOUT = timedelta(minutes=5)


Training = tuple[nn.Module, Optimizer, Callable[..., Any]]
"""A model, its optimizer and its loss."""


def device_of(model: nn.Module) -> torch.device:
    return next(parameter.device for parameter in model.parameters() if parameter.requires_grad)


def copied(own: Training) -> Training:
    """Copies that share no memory with ``own``, with a learning rate of 0, so that nothing diverges.

    Raises:
        UnsupportedError: something in it cannot be copied.
    """
    try:
        model, optimizer, loss = copy.deepcopy(own)
    except Exception as error:
        raise UnsupportedError(
            f"model, optimizer or loss cannot be copied ({type(error).__name__}: {error}): choose on another run of "
            "the model, and give this one that plan: auto(..., plan=Plan.load(path))"
        ) from error
    drop_hooks(optimizer)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    return model, optimizer, loss


@contextlib.contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Within it random numbers may be drawn; afterwards all generators are where they were before."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    module = torch.get_device_module(device) if has_streams(device) else None
    on_cpu, on_device = torch.get_rng_state(), None if module is None else module.get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        torch.set_rng_state(on_cpu)
        if module is not None:
            module.set_rng_state(on_device, device)


# The decisions of rank 0 for all.
_first = operator.itemgetter(0)


def _of_all(found: list[Any]) -> list[Any]:
    """The first refusal, and the largest of each number."""
    refusals, numbers = zip(*found, strict=True)
    return [next(filter(None, refusals), None), list(map(max, zip(*numbers, strict=False)))]


@dataclass(frozen=True)
class Like:
    """The kind of step that the loop makes."""

    accumulate: int = 1
    """Backwards a step, all but the last under ``no_sync``."""
    autocast: torch.dtype | None = None
    """The dtype of ``torch.autocast`` around forward and loss; ``None``: none."""

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def __str__(self) -> str:
        precision = "without autocast" if self.autocast is None else f"under autocast to {self.autocast}"
        return f"{self.accumulate} backward{'s' if self.accumulate > 1 else ''} a step, {precision}"


class _Lane:
    """A copy in DDP, ready to step."""

    def __init__(
        self, candidate: str, ddp: DistributedDataParallel, optimizer: Optimizer, loss: Callable[..., Any], like: Like
    ) -> None:
        self.candidate, self.ddp, self.optimizer, self.loss, self.like = candidate, ddp, optimizer, loss, like
        self.device = device_of(ddp)
        self.step_ms = 0.0
        """Of the slowest rank; 0 before the first step."""

    def step(self, batch: Sequence[Any]) -> None:
        """Raises: ConfigurationError: the loss is not a scalar that backward could start from."""
        self.optimizer.zero_grad()
        for _ in range(self.like.accumulate - 1):
            with self.ddp.no_sync():
                self._backward(batch)
        self._backward(batch)
        self.optimizer.step()

    def _backward(self, batch: Sequence[Any]) -> None:
        *inputs, target = batch
        with self.like.precision(self.device):
            value = self.loss(self.ddp(*inputs), target)
        torch.clear_autocast_cache()  # The caller's own block would keep the casts of parameters.
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            without = ", without a gradient" if isinstance(value, Tensor) and not value.requires_grad else ""
            raise ConfigurationError(
                f"loss returned {got}{without}: give a function of (output, target) that returns a tensor of one "
                "element that depends on the output"
            )
        value.backward()

    def finish(self) -> None:
        """Wait for the work left to the next forward."""
        getattr(self.optimizer, "wait", lambda: None)()


class Race:
    """Candidates on copies of ``own`` and a sample of this rank, beside plain DDP; see [Note: the race].

    Communication: collectives on a group of the ranks of ``group``, which is gone when the block ends.

    Args:
        progress: counts seconds, and shows the candidate that runs.
    """

    def __init__(
        self,
        agreement: Agreement,
        group: dist.ProcessGroup,
        own: Training,
        sample: Sequence[Any],
        *,
        ddp_options: Mapping[str, Any],
        like: Like,
        progress: tqdm[None],
    ) -> None:
        self._progress, self._start_s = progress, time.monotonic()
        self._agreement, self._given_group = agreement, group
        self._own, self._sample, self._ddp_options, self._like = own, sample, ddp_options, like
        self.samples: dict[str, list[float]] = {PLAIN: []}
        """Of each candidate, ms a step of the slowest rank in its last rounds; of plain DDP, in all."""
        self.ratios: dict[str, list[float]] = {}
        """Of each of these rounds, the step of the candidate as a part of plain DDP's."""
        self.refused: dict[str, str] = {}
        """The candidates that could not be built, or did not take a step, and the reasons."""
        self.is_complete = True
        """Whether the time was enough for all."""
        self._group: dist.ProcessGroup | None = None
        """Of the lanes; made where there is none."""
        self._abandoned: list[dist.ProcessGroup] = []
        """Kept longer than the lanes. A reducer that frees a Gloo group waits, with the GIL, for the group's threads,
        and one of these waits for the GIL if it frees a collective that has failed; Python frees a group without it."""
        self._lanes: dict[str, _Lane] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
            return
        for candidate in list(self._lanes):
            self._drop(candidate)
        if self._group is not None:
            forget(self._group)
            dist.destroy_process_group(self._group)

    def run(self, entrants: Sequence[str], *, end_s: float) -> str | None:
        """Race until ``end_s`` of rank 0's monotonic clock; returns the fastest candidate, if one was raced.

        Where the time is short, the first of ``entrants`` race.

        Raises:
            ConfigurationError: plain DDP does not take the model.
        """
        self._show(PLAIN)
        start_s, plain = time.monotonic(), self._plain()
        add_ms = self._agreement.agree(1e3 * (time.monotonic() - start_s), _first)
        final_ms = add_ms + FEWEST_ROUNDS * 2 * max(plain.step_ms, _SAMPLE_MS)
        self.samples[PLAIN].append(plain.step_ms)
        start_s = time.monotonic()
        for place, one in enumerate(entrants, 1):
            if self._agreement.agree(1e3 * (end_s - time.monotonic()) < final_ms, _first):
                self.is_complete = False
                break
            self._compare(one, until_s=start_s + place * (end_s - start_s) / 2 / len(entrants), least=1)
        raced = [one for one in entrants if one in self.ratios and one not in self.refused]
        if not raced:
            return None
        fastest = min(raced, key=lambda one: statistics.median(self.ratios[one]))
        self._compare(fastest, until_s=end_s, least=FEWEST_ROUNDS)
        return None if fastest in self.refused else fastest

    def _show(self, candidate: str) -> None:
        self._progress.set_description_str(f"overlap.auto races {candidate}")

    def _plain(self) -> _Lane:
        lane = self._lanes.get(PLAIN) or self._add(PLAIN)
        if lane is None:
            raise ConfigurationError(f"{PLAIN} does not take this model: {self.refused[PLAIN]}")
        return lane

    def _compare(self, candidate: str, *, until_s: float, least: int) -> None:
        """Rounds of ``candidate`` and of plain DDP, up to a time of rank 0, but at least so many."""
        self._show(candidate)
        plain, lane = self._plain(), self._add(candidate)
        if lane is None:
            return
        samples = self.samples[candidate] = list[float]()
        ratios = self.ratios[candidate] = list[float]()
        is_over = 0.0
        while len(ratios) < least or not (is_over or len(ratios) >= _MOST_ROUNDS):
            # In turns, so that neither always comes after the other.
            order = [plain, lane] if len(ratios) % 2 == 0 else [lane, plain]
            found = self._together(candidate, partial(self._round, order, until_s))
            if found is None:
                return
            *times, is_over = found
            ms = dict(zip(order, times, strict=True))
            self.samples[PLAIN].append(ms[plain])
            samples.append(ms[lane])
            ratios.append(ms[lane] / ms[plain])
            self._progress.n = min(time.monotonic() - self._start_s, self._progress.total)
            self._progress.refresh()
        self._drop(candidate)

    def _round(self, order: Sequence[_Lane], until_s: float) -> list[float]:
        times = [self._sample_ms(lane) for lane in order]
        return [*times, self._agreement.rank == 0 and time.monotonic() >= until_s]

    def _add(self, candidate: str) -> _Lane | None:
        """Build ``candidate`` on a copy, and take its first steps; ``None`` where a rank could not."""
        gc.collect()  # The copies before, whose parameters and stages are in cycles.
        if self._group is None:
            given = self._given_group
            self._group = own_subgroup(range(given.size()), given, timeout=_TIMEOUT, has_priority=False)
            # A rank that fails closes its connections: not before all ranks have connected.
            self._agreement.agree()

        def wrapped() -> None:
            model, optimizer, loss = copied(self._own)
            ddp = DistributedDataParallel(model, process_group=self._group, init_sync=False, **self._ddp_options)
            self._lanes[candidate] = _Lane(candidate, ddp, optimizer, loss, self._like)

        def built() -> None:
            lane = self._lanes[candidate]
            lane.optimizer = build(lane.ddp, lane.optimizer, METHODS[candidate])

        if self._together(candidate, wrapped) is None or self._together(candidate, built) is None:
            return None
        lane = self._lanes[candidate]
        for _ in range(_WARMUP_STEPS):
            times = self._together(candidate, lambda: [self._sample_ms(lane)])
            if times is None:
                return None
            if (step_ms := times[0]) > _LONG_MS:
                break
        lane.step_ms = step_ms
        return lane

    def _together(self, candidate: str, run: Callable[[], list[float] | None]) -> list[float] | None:
        """The largest of each number that ``run`` returns on the ranks; ``None`` if one refuses ``candidate``.

        Raises: any error that does not refuse it; the other ranks then raise a PeerError.
        """
        result: list[float] | None = None
        refusal: str | None = None
        failure: Exception | None = None
        try:
            result = run()
        except Exception as error:
            if isinstance(error, ConfigurationError):
                refusal = str(error)
            elif isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
                refusal = f"out of memory on rank {self._agreement.rank}"
            self._abandon(error)
            if refusal is None and not isinstance(error, CollectiveError) and not has_lost_connection(error):
                raise
            # Perhaps the effect of a refusal on another rank. Without the frames, which have the copies.
            failure = error.with_traceback(None)
        first, largest = self._agreement.agree([refusal, result or []], _of_all)
        if first is not None:
            self.refused[candidate] = first
            self._abandon(ConfigurationError(first))
            return None
        if failure is not None:
            raise failure
        return list(largest)

    def _sample_ms(self, lane: _Lane) -> float:
        """Ms a step on this rank; all ranks start together."""
        steps = max(1, math.ceil(_SAMPLE_MS / lane.step_ms)) if lane.step_ms else 1
        # An untimed step before them: the work that it leaves to the next forward stands for that of the last one.
        leads_in = METHODS[lane.candidate].update == "sharded, gathered in forward" and lane.step_ms > 0
        batches = [copy.deepcopy(self._sample) for _ in range(steps + leads_in)]
        # Before the lead-in: behind it, work left to the next forward would arrive while ranks wait here.
        group_all_reduce(torch.zeros(1, device=lane.device), group=lane.ddp.process_group)
        if leads_in:
            lane.step(batches.pop())
        _settle(lane.device)
        start_s = time.perf_counter()
        for batch in batches:
            lane.step(batch)
        _settle(lane.device)
        ms = 1e3 * (time.perf_counter() - start_s) / steps
        lane.finish()
        return ms

    def _drop(self, candidate: str) -> None:
        lane = self._lanes.pop(candidate)
        lane.finish()
        if (registration := registration_of(lane.ddp)) is not None:
            registration.remove()

    def _abandon(self, error: BaseException) -> None:
        """Give up all lanes and close the connections, so that no rank waits for this one."""
        for lane in self._lanes.values():
            if (registration := registration_of(lane.ddp)) is not None:
                with contextlib.suppress(OverlapError, RuntimeError):
                    registration.report(error)
                    registration.remove()
        self._lanes.clear()
        group, self._group = self._group, None
        if group is not None:
            self._abandoned.append(group)
            forget(group, has_failed=True)
            abandon_group(group)
            dist.destroy_process_group(group)


def _settle(device: torch.device) -> None:
    # Not other streams: their work is left to the next forward, as on the CPU.
    if has_streams(device):
        current_stream(device).synchronize()
