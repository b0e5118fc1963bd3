"""Exposed communication is what a step takes longer than its computation alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap import Bucket, Stage, Timeline, chain
from overlap.hooks import future_result

_LAYERS, _WIDTH, _BACKWARD_S = 6, 512, 0.02
_LAYER_BYTES = 4 * _WIDTH * _WIDTH


class _Slow(torch.autograd.Function):
    """Computes as slowly as it says whatever else the machine does: it sleeps."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(_BACKWARD_S)
        return gradient


class _Layer(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return _Slow.apply(super().forward(inputs))  # type: ignore[no-any-return]


def _model() -> DistributedDataParallel:
    layers = [_Layer(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=_LAYER_BYTES / 2**20)


def _measure(ddp: DistributedDataParallel) -> tuple[float, float, float]:
    """Exposed communication, step minus compute-only, in ms, and the share that was hidden.

    Of the fastest of five steps: what else the machine does makes steps longer and says nothing about them.
    """
    inputs = torch.randn(4, _WIDTH)

    def step_ms(*, is_synced: bool) -> float:
        start_s = time.perf_counter()
        with nullcontext() if is_synced else ddp.no_sync():
            ddp(inputs).sum().backward()
        return 1e3 * (time.perf_counter() - start_s)

    step_ms(is_synced=True)
    compute_ms = min(step_ms(is_synced=False) for _ in range(5))
    with Timeline(ddp) as timeline:
        step_ms(is_synced=True)
        whole_ms = [step_ms(is_synced=True) for _ in range(5)]
    fastest_ms, fastest = min(zip(whole_ms, timeline.steps[1:], strict=True), key=lambda pair: pair[0])
    return fastest.exposed_ms, fastest_ms - compute_ms, fastest.overlap_fraction or 0.0


def _assert_agree(exposed_ms: float, difference_ms: float, hidden: float, *, transfer_ms: float) -> None:
    assert exposed_ms == pytest.approx(difference_ms, rel=0.1)
    # All but the last bucket's transfer could be hidden behind the other layers' backward.
    expected_ms = _LAYERS * transfer_ms - (_LAYERS - 1) * 1e3 * _BACKWARD_S
    assert exposed_ms == pytest.approx(expected_ms, rel=0.25)
    assert hidden == pytest.approx(1 - expected_ms / (_LAYERS * transfer_ms), abs=0.12)


class _Link(Stage):
    """Sends nothing and takes its time: one transfer after the other, 60 ms each."""

    transfer_s = 0.06

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, bucket: Bucket) -> None:
        sent: torch.futures.Future[None] = torch.futures.Future()
        self._thread.submit(self._transfer, sent)
        await future_result(sent)

    def _transfer(self, sent: torch.futures.Future[None]) -> None:
        time.sleep(self.transfer_s)
        sent.set_result(None)


def _with_collectives_of_known_cost(rank: int, world_size: int) -> Any:
    ddp = _model()
    chain(_Link()).register(ddp)
    return _measure(ddp)


def test_it_agrees_with_step_minus_compute_only_where_collectives_take_a_known_time() -> None:
    (measured,) = run_ranks(_with_collectives_of_known_cost, 1)
    _assert_agree(*measured, transfer_ms=1e3 * _Link.transfer_s)
