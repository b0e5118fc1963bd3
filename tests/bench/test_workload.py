"""The models that the benchmark trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from overlap.bench.workload import workload


@pytest.mark.parametrize(("name", "millions"), [("mlp", 0.79), ("transformer", 5.28), ("resnet18", 11.69)])
def test_workloads_train(name: str, millions: float) -> None:
    one = workload(name)
    model = one.make_model()
    inputs, target = one.make_batch(2)
    loss = nn.functional.cross_entropy(model(inputs), target)
    loss.backward()
    assert torch.isfinite(loss)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert numel / 1e6 == pytest.approx(millions, rel=0.01)
