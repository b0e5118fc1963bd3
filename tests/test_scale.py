"""On an accelerator nothing that a rank does or keeps depends on the number of ranks, but what is sent.

As the code for accelerators runs on streams that do nothing, with a fake process group; exact counts.
"""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.host_cost import calls_counted, model_on
from benchmarks.scale import counts, tensors_alive
from overlap import ZeroRedundancyOptimizer
from overlap.optim.zero import exchange, prefetch

# Of layers of this width some parameters are not divided evenly, by 8 ranks or by 512.
_WIDTH = 20
# A bucket's six parameters have an owner each at 8 ranks, too.
_BUCKETS = {"ZeroStep, by parameter": 1}


@pytest.mark.parametrize(
    "method",
    [
        "ZeroStep",
        "ZeroStep, in forward",
        "ZeroStep, by parameter",
        "Quantize(Int8())",
        "PowerSGD(rank=4)",
        "DivideByCount, AllReduce",
    ],
)
def test_a_step_makes_as_many_calls_and_operators_and_keeps_as_many_tensors_at_512_ranks_as_at_8(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_LEAST_BYTES_ON_STREAMS", 2**24)  # Tests of streams cut gathers into small parts.
    prefetch._leave_untraced()  # Once in a process.
    few, many = (counts(method, ranks, _BUCKETS.get(method, 4), width=_WIDTH) for ranks in (8, 512))
    assert many == few


def _made(ranks: int, partition: str, parameters: int) -> tuple[int, int]:
    """Calls of the constructor, and tensors that it leaves."""
    with model_on(ranks, 1):
        model = nn.ParameterList(torch.zeros(20, 3) for _ in range(parameters))
        before = tensors_alive()
        with calls_counted() as calls:
            zero: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition)
        made = tensors_alive() - before
        assert len(zero.shards) == parameters
        return calls[0], made


# Of eight whole parameters this rank owns one at 8 ranks, too.
@pytest.mark.parametrize(("partition", "parameters"), [("element", 288), ("parameter", 8)])
def test_the_constructor_makes_as_many_calls_and_tensors_at_512_ranks_as_at_8(partition: str, parameters: int) -> None:
    few, many = (_made(ranks, partition, parameters) for ranks in (8, 512))
    assert many == few
