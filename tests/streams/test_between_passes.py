"""What is in flight, on streams: behind a failure, and where nobody waits for it any more."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import on_ranks
from harness.streams import STREAMS_BACKEND, detecting
from overlap import AllReduce, Bucket, LocalSGD, Stage, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.hooks import StageContext, all_reduce
from overlap.hooks.engine.wavefront import BackgroundTask
from overlap.hooks.stage import Role

from .model import batch, wrapped


def _sharded(ddp: DistributedDataParallel) -> Any:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    return zero


def _local(ddp: DistributedDataParallel) -> Any:
    return LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=3, start_step=0, overlap=True)


def _trained_and_dropped(rank: int, build: Callable[[DistributedDataParallel], Any]) -> None:
    """A model can be dropped while gathers or averages ride."""
    ddp = wrapped()
    batches = [batch(step, rank) for step in range(3)]
    with detecting() as detector:
        optimizer = build(ddp)
        for tokens, target in batches:
            torch.nn.functional.mse_loss(ddp(tokens), target).backward()
            optimizer.step()
        del optimizer, ddp
        gc.collect()
        torch.ones(16, device=torch.device("cpu")).mul_(2)  # Such memory could be handed out for this.
    detector.report.check()


class _Fails(Stage):
    """Runs something between passes that reads the gradients and then fails."""

    role = Role.TRANSFORM

    def attach(self, context: StageContext) -> None:
        self.context = context

    def before_backward(self, *, is_replay: bool) -> None:
        self.buffers: list[torch.Tensor] = []

    async def __call__(self, bucket: Bucket) -> None:
        self.buffers.append(bucket.buffer)

    async def _work(self, item: BackgroundTask) -> None:
        total = torch.stack([buffer.sum() for buffer in self.buffers])
        await all_reduce(total)
        raise RuntimeError("as it was told")

    def after_backward(self, *, failed: bool) -> None:
        assert self.context.background is not None
        (self.completion,) = self.context.background([BackgroundTask(index=0)], self._work).values()


def _failing(rank: int) -> None:
    """Gradients can be changed behind a failure between passes."""
    ddp = wrapped(gradient_as_bucket_view=True)
    batches = [batch(step, rank) for step in range(3)]
    with detecting() as detector:
        stage = _Fails()
        chain(AllReduce(), stage).register(ddp)
        for tokens, target in batches:
            torch.nn.functional.mse_loss(ddp(tokens), target).backward()
            with pytest.raises(RuntimeError, match="as it was told"):
                stage.completion.wait()
            ddp.zero_grad(set_to_none=False)
    detector.report.check()


@on_ranks(2, backend=STREAMS_BACKEND)
def test_what_rides_between_passes_is_waited_for_behind_a_failure_and_where_the_model_is_dropped(rank: int) -> None:
    for build in (_sharded, _local):
        _trained_and_dropped(rank, build)
    _failing(rank)
