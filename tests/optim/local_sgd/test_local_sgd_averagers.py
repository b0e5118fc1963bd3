"""Averaging parameters: the function, the averagers beside PyTorch's, and the optimizer around them."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import assert_parity, run_ranks, run_threads
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import ConfigurationError
from overlap.optim.local_sgd import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)
from overlap.optim.local_sgd.average import Packed, Slice, into_parts


def _mean_over(tensor: Tensor, *, wide: torch.dtype | None = None, group: Any = None) -> Tensor:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return (sum(part.to(wide or part.dtype) / len(gathered) for part in gathered)).to(tensor.dtype)  # type: ignore[union-attr]


def _tensors(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "scalar": random(1)[0].clone(),
        "matrix": random(30, 7),
        "strided": random(8, 6).t(),
        "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "double": random(11, dtype=torch.float64),
        "half": random(9, dtype=torch.bfloat16),
        "complex": torch.complex(random(5), random(5)),
        "empty": random(0, 4),
        "integer": torch.tensor([rank, 7]),
        "large": random(1_200, 1_100),
        "large and half": random(1_500, 1_500, dtype=torch.bfloat16),
    }


def _averages(rank: int, world_size: int) -> None:
    tensors = _tensors(rank)
    kinds = {type(part) for part in into_parts(tensors.values())}
    assert kinds == {Slice, Packed}, "both ways are under test"
    storage = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    expected = {
        name: tensor.clone() if name in ("integer", "empty") else _mean_over(tensor) for name, tensor in tensors.items()
    }
    # Groups of an optimizer, one of them twice, none with a gradient.
    average_parameters([{"params": list(tensors.values())}, {"params": [tensors["matrix"]]}])
    assert_parity(tensors, expected, what="means")
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == storage
    assert tensors["channels last"].is_contiguous(memory_format=torch.channels_last)

    tensors = _tensors(rank)
    halves = [tensors["half"], tensors["large and half"]]
    expected_halves = [_mean_over(tensor, wide=torch.float32) for tensor in halves]
    average_parameters(iter(halves), dtype=torch.float32)
    assert_parity(halves, expected_halves, what="bfloat16, averaged in fp32")

    solo = dist.new_group([0])
    before = _tensors(rank)["matrix"]
    average_parameters([before], solo)  # On rank 1, which is not in the group, nothing happens.
    assert_parity(before, _tensors(rank)["matrix"], what="a group of one")


def _torch_parity(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms.model_averaging import averagers as theirs

    def run(make: Any, start: int) -> list[dict[str, Tensor]]:
        model = MLP.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        averager = make()
        records = []
        for step in range(start, start + 30):
            optimizer.zero_grad()
            mean_squared_error(model, MLP.batch(step, rank)).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
            records.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return records

    for period, warmup in ((1, 0), (4, 6)):
        if period == 1:
            with pytest.warns(UserWarning, match="plain DDP is faster"):
                PeriodicModelAverager(period)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = run(lambda: PeriodicModelAverager(period, warmup), 0)  # noqa: B023
            reference = run(lambda: theirs.PeriodicModelAverager(period, warmup), 0)  # noqa: B023
        assert_parity(ours, reference, what=f"period {period}")


def _two_ranks(rank: int, world_size: int) -> None:
    _averages(rank, world_size)
    _torch_parity(rank, world_size)
    _optimizer(rank)


def _optimizer(rank: int) -> None:
    """What PyTorch's wrapper gets wrong, with the averager in turn at every second step."""
    model = BATCH_NORM.model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2))
    calls: list[str] = []
    wrapped.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)

    def closure() -> Tensor:
        wrapped.zero_grad()
        loss = mean_squared_error(model, MLP.batch(0, rank))
        loss.backward()
        return loss

    assert wrapped.step(closure).item() > 0
    schedule.step()
    assert calls == ["pre", "post"]
    assert wrapped.defaults is inner.defaults and inner.param_groups[0]["lr"] == 0.05
    saved = copy.deepcopy(wrapped.state_dict())
    assert saved["step"] == 1
    inner.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    wrapped.load_state_dict(saved)
    assert wrapped.param_groups is inner.param_groups and wrapped.averager.step == 1
    wrapped.param_groups[0]["lr"] = 0.01
    assert inner.param_groups[0]["lr"] == 0.01
    with pytest.warns(UserWarning, match="starts again from step 0"):
        wrapped.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    assert wrapped.averager.step == 0

    # A gradient that is not finite on one rank: that rank updates nothing, and averages with the others.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 8.0 if rank == 0 else float("inf"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    momenta = [inner.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    stepped = [p - 0.05 * (0.9 * m + 2.0) if rank == 0 else p for p, m in zip(before, momenta, strict=True)]
    scaler.scale(torch.zeros(()))  # So that there is a scale.
    scaler.step(wrapped)
    expected = [_mean_over(parameter) for parameter in stepped]
    assert_parity(
        [parameter.detach() for parameter in model.parameters()],
        expected,
        what="a step that GradScaler skips on one rank",
        exact=False,
        rtol=1e-6,
        atol=1e-7,
        reason="the update is written as another expression",
    )


def test_averages_and_the_optimizer_around_them() -> None:
    run_ranks(_two_ranks, 2)


def _hierarchy(rank: int, world_size: int) -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    averager = HierarchicalModelAverager(OrderedDict([(1, 1), (2, 2), (6, 4)]), warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), averager)
    # The paper's algorithm on all ranks' values at once: each subtracts its rank + 1, then groups average.
    values = [float(r) for r in range(world_size)]
    for step in range(14):
        model.weight.grad = torch.full_like(model.weight, float(rank + 1))
        optimizer.step()
        values = [value - (r + 1) for r, value in enumerate(values)]
        size = 4 if step % 6 == 0 else 2 if step % 2 == 0 else 1
        if step >= 2:
            values = [sum(values[r // size * size :][:size]) / size for r in range(world_size)]
        assert_parity(
            model.weight.detach().flatten()[:1].double(),
            torch.tensor([values[rank]], dtype=torch.float64),
            what=f"step {step}",
            exact=False,
            rtol=1e-6,
            reason="the reference counts in float64",
        )
    # PyTorch's word: the largest size is everyone.
    for wrong, match in (
        ({2: 2}, "the last size"),
        ({2: 3, 4: 4}, "3 does not divide 4"),
        ({4: 2, 2: 4}, "periods of period_group_size_dict must ascend"),
        ({2: 4, 4: 2}, "sizes of period_group_size_dict must ascend"),
        ({0: 4}, "whole number of at least 1"),
        ({}, "is empty"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            HierarchicalModelAverager(wrong)


def test_three_levels_on_four_ranks() -> None:
    run_ranks(_hierarchy, 4)


def _wrong(rank: int, world_size: int) -> None:
    for make, match in (
        (lambda: PeriodicModelAverager(0), "period must be a whole number of at least 1, got 0"),
        (lambda: PeriodicModelAverager(True), "got True"),
        (lambda: PeriodicModelAverager(2, -1), "warmup_steps must be a whole number of at least 0, got -1"),
        (lambda: average_parameters(["weight"]), "was given str"),  # type: ignore[list-item]
        (lambda: PostLocalSGDOptimizer(torch.optim.SGD, PeriodicModelAverager(2)), "the class SGD"),  # type: ignore[arg-type]
        (
            lambda: PostLocalSGDOptimizer(torch.optim.SGD([torch.ones(1)]), PeriodicModelAverager),  # type: ignore[arg-type]
            "takes a ModelAverager",
        ),
    ):
        with pytest.raises(ConfigurationError, match=match):
            make()


def test_wrong_arguments_are_named() -> None:
    run_threads(_wrong, 1)
    with pytest.raises(ConfigurationError, match="init_process_group"):
        PeriodicModelAverager(2)
