"""The models that the benchmark trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from overlap.bench.gpt import GPTConfig
from overlap.bench.workload import gpt_workload, workload


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


@pytest.mark.parametrize(("name", "millions"), [("resnet50", 25.56), ("gpt-350m", 354.87)])
def test_models_for_gpus_have_their_size(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = workload(name).make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_a_gpt_trains_and_sees_no_later_token() -> None:
    one = gpt_workload(GPTConfig(layers=2, width=32, heads=2, vocabulary=64, tokens=8))
    model = one.make_model()
    inputs, target = one.make_batch(2)
    logits = model(inputs)
    nn.functional.cross_entropy(logits, target).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    inputs[:, -1] = (inputs[:, -1] + 1) % 64
    changed = (model(inputs) != logits).view(2, 8, 64).any(dim=2)
    assert changed[:, -1].all() and not changed[:, :-1].any()
