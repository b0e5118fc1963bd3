"""On an accelerator, whose host would wait for a comparison, a forward that leads to own gradients is refused."""

import pytest
import torch

from benchmarks.host_cost import model_on
from overlap import AllReduce, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.errors import TrainingLoopError


def test_a_forward_without_synchronization_before_a_step_that_is_due_is_refused() -> None:
    with model_on(8, 2) as (ddp, x):
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        chain(AllReduce(), ZeroStep(zero, deferred=True)).register(ddp)
        for _ in range(3):
            with ddp.no_sync():
                ddp(x).sum().backward()
            ddp(x).sum().backward()
            with ddp.no_sync(), pytest.raises(TrainingLoopError, match=r"own gradients to the mean.*after zero\.step"):
                ddp(x)
            with ddp.no_sync(), torch.no_grad():
                ddp(x)
            zero.step()
