"""Every rank gives Join the same joinables in the same order; in PyTorch's, a model comes before its optimizer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed.algorithms import Join as TorchJoin

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Join,
    LocalSGD,
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

_TIMEOUT_S = 20


def _model(seed: int = 1) -> Any:
    return wrap(MLP.model(seed=seed), **MLP.ddp_options())


def _of_other_kinds(ddp: Any) -> list[Any]:
    return [ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)]


def _of_other_sizes(ddp: Any) -> list[Any]:
    first, *others = ddp.parameters()
    return [torch.optim.SGD(others, lr=0.1), torch.optim.SGD([first], lr=0.1), ddp]


def _schedulers(ddp: Any) -> list[Any]:
    *optimizers, _ = _of_other_sizes(ddp)
    return [*(torch.optim.lr_scheduler.StepLR(optim, step_size=1) for optim in optimizers), ddp]


def _in_another_order(rank: int, world_size: int) -> None:
    for make in (_of_other_kinds, _of_other_sizes, _schedulers):
        first, second, *others = make(_model())
        start_s = time.monotonic()
        with (
            pytest.raises(
                ConfigurationError, match=r"rank 1 enters Join with \[.*\], .* but rank 0 with \[.*same order"
            ),
            Join([*((second, first) if rank else (first, second)), *others]),
        ):
            pass
        assert time.monotonic() - start_s < _TIMEOUT_S / 2
        with Join([first, second, *others]):
            pass
    ddp = _model()
    optim = (torch.optim.SGD if rank else torch.optim.Adam)(ddp.parameters(), lr=0.1)
    with pytest.raises(
        ConfigurationError, match=r"rank 1 enters Join with \[.*, SGD of .*, but rank 0 with \[.*, Adam"
    ):
        Join([ddp, optim]).__enter__()


def test_other_joinables_or_another_order_are_refused_on_every_rank() -> None:
    run_ranks(_in_another_order, 2, group_timeout_s=_TIMEOUT_S)


def _step(ddp: Any) -> Any:
    optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    chain(AllReduce(), Step(optim)).register(ddp)
    return optim


def _zero_step(ddp: Any) -> Any:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    return zero


def _local_sgd(ddp: Any) -> Any:
    return LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=2)


def _train(ddp: Any, optim: Any, joinables: list[Any], rank: int) -> None:
    with TorchJoin(joinables):
        for batch in MLP.batches(rank, steps=2 + 3 * rank):
            optim.zero_grad()
            mean_squared_error(ddp, batch).backward()
            optim.step()


def _in_torch_join(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    trained = []
    for make in (_step, _zero_step, _local_sgd):
        ddp = _model()
        optim = make(ddp)
        start_s = time.monotonic()
        with pytest.raises(ConfigurationError, match=r"comes before its model in PyTorch's Join.*Join\(\[ddp, "):
            _train(ddp, optim, [optim, ddp], rank)
        assert time.monotonic() - start_s < _TIMEOUT_S / 2
        ddp = _model()
        optim = make(ddp)
        _train(ddp, optim, [ddp, optim], rank)
        trained.append([parameter.detach() for parameter in ddp.parameters()])
    return trained


def test_in_torch_join_an_optimizer_before_its_model_is_refused() -> None:
    first, second = run_ranks(_in_torch_join, 2, group_timeout_s=_TIMEOUT_S)
    for ones, others in zip(first, second, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
