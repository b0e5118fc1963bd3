"""Several models in one backward connect, and connect again when they have failed, in any order on each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import Bucket, PeerError, Stage, chain
from overlap.hooks import all_reduce
from overlap.ranks.board import Board

_FAILING = (2, 4)
_STEPS = 6
# The forward in which DDP compares its buckets between ranks: their models come in one order there.
_COMPARING = 1
_CONNECTING_S = 30


class _Flaky(Stage):
    """The all-reduce on ``group``, which raises in the first bucket of some steps where it is ``enabled``."""

    def __init__(self, group: Any, *, enabled: bool) -> None:
        self.group, self.enabled, self.told = group, enabled, 0

    async def __call__(self, bucket: Bucket) -> None:
        if self.enabled and bucket.index == 0 and bucket.step in _FAILING:
            raise ValueError("the dog ate it")
        bucket.buffer.mul_(1 / bucket.divisor)
        await all_reduce(bucket.buffer, group=self.group)

    def after_backward(self, *, failed: bool) -> None:
        self.told += 1


def _noting_connections(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time that connections begin to be made."""
    begun = threading.Semaphore(0)
    connect = Board.connect

    def noted(*args: Any, **options: Any) -> Any:
        begun.release()
        return connect(*args, **options)

    monkeypatch.setattr(Board, "connect", noted)
    return begun


def _step(ddps: list[Any], step: int, rank: int, before_the_first: Callable[[], object]) -> None:
    """One backward of all models, of which that of the last begins first."""
    for ddp in ddps:
        ddp.zero_grad()
    outputs = [ddp(*MLP.batch(step, rank).inputs) for ddp in ddps]

    def hook(gradient: torch.Tensor) -> None:
        before_the_first()

    outputs[0].register_hook(hook)
    sum(output.square().sum() for output in outputs).backward()


def _mean_gradients(seed: int, step: int, world_size: int) -> list[torch.Tensor]:
    model = MLP.model(seed=seed)
    for rank in range(world_size):
        (model(*MLP.batch(step, rank).inputs).square().sum() / world_size).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _both(rank: int, world_size: int) -> None:
    group = dist.new_group(range(world_size))
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = _noting_connections(monkeypatch)
        models = [wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1)]
        stages = [_Flaky(group, enabled=rank == 0) for _ in models]
        for ddp, stage in zip(models, stages, strict=True):
            chain(stage).register(ddp)
        for step in range(_STEPS):
            in_order = models if rank == 0 or step == _COMPARING else models[::-1]
            while begun.acquire(blocking=False):
                pass
            connects = step - 1 in _FAILING or step == 0

            def wait(connects: bool = connects) -> None:
                assert not connects or begun.acquire(timeout=_CONNECTING_S)

            if step in _FAILING:
                with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it"):
                    _step(in_order, step, rank, wait)
                continue
            _step(in_order, step, rank, wait)
            for seed, ddp in enumerate(models):
                for ours, expected in zip(ddp.parameters(), _mean_gradients(seed, step, world_size), strict=True):
                    torch.testing.assert_close(ours.grad, expected)
        assert [stage.told for stage in stages] == [_STEPS, _STEPS], "though backward can raise one error only"


def test_two_models_that_connect_in_other_orders_are_not_mixed_up() -> None:
    run_ranks(_both, 2, group_timeout_s=15)
