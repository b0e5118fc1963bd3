"""Every rank gives Join the same joinables in the same order; in PyTorch's, a model comes before its optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def _models() -> list[Any]:
    """Two models of one layout, and so two optimizers, which only their values tell apart."""
    return [wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (1, 2)]


def _optimizers(ddp: Any) -> list[torch.optim.Optimizer]:
    first, *others = ddp.parameters()
    return [torch.optim.SGD(others, lr=0.1), torch.optim.SGD([first], lr=0.1)]


def _of_other_kinds() -> list[Any]:
    ddp = _models()[0]
    return [ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)]


def _of_other_values() -> list[Any]:
    return _models()


def _of_other_sizes() -> list[Any]:
    ddp = _models()[0]
    return [*_optimizers(ddp), ddp]


def _of_other_optimizers() -> list[Any]:
    ddp = _models()[0]
    schedulers = [torch.optim.lr_scheduler.StepLR(optim, step_size=1) for optim in _optimizers(ddp)]
    return [*schedulers, ddp]


def _in_another_order(rank: int, world_size: int, make: Callable[[], list[Any]], message: str) -> None:
    first, second, *others = make()
    start_s = time.monotonic()
    with (
        pytest.raises(ConfigurationError, match=message),
        Join([*((second, first) if rank else (first, second)), *others]),
    ):
        pass
    assert time.monotonic() - start_s < _TIMEOUT_S / 2
    with Join([first, second, *others]):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_of_other_kinds, r"rank 1 enters Join with \[SGD, Dist.*\], but rank 0 with \[Dist.*, SGD\].*the same order"),
        (_of_other_values, "rank 1 enters Join with a DistributedDataParallel in place 0 .* rank 0 has in place 1"),
        (_of_other_sizes, "rank 1 enters Join with a SGD in place 0 .* rank 0 has in place 1"),
        (_of_other_optimizers, "rank 1 enters Join with a StepLR in place 0 .* rank 0 has in place 1"),
    ],
    ids=["kinds", "values", "sizes", "optimizers"],
)
def test_another_order_of_joinables_is_refused_on_every_rank(make: Callable[[], list[Any]], message: str) -> None:
    run_ranks(_in_another_order, 2, make, message, group_timeout_s=_TIMEOUT_S)


def _with_other_joinables(rank: int, world_size: int) -> None:
    ddp = _models()[0]
    optim = (torch.optim.SGD if rank else torch.optim.Adam)(ddp.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"rank 1 enters Join with \[.*, SGD\], but rank 0 with \[.*, Adam\]"):
        Join([ddp, optim]).__enter__()


def test_other_joinables_are_refused_on_every_rank() -> None:
    run_ranks(_with_other_joinables, 2, group_timeout_s=_TIMEOUT_S)


def _apart(rank: int, world_size: int) -> None:
    """Ranks may have other values than others: what looks like no joinable of rank 0 is not in another place."""
    models = _models()
    with torch.no_grad():
        for ddp in models:
            for parameter in ddp.parameters():
                parameter.add_(rank)
    with Join(models):
        pass


def test_ranks_that_have_trained_apart_may_enter_join() -> None:
    run_ranks(_apart, 2, group_timeout_s=_TIMEOUT_S)


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


def _in_torch_join(rank: int, world_size: int, make: Callable[[Any], Any]) -> list[torch.Tensor]:
    for order in ("optimizer first", "model first"):
        ddp = _models()[0]
        optim = make(ddp)
        if order == "model first":
            _train(ddp, optim, [ddp, optim], rank)
            return [parameter.detach() for parameter in ddp.parameters()]
        start_s = time.monotonic()
        with pytest.raises(ConfigurationError, match=r"comes before its model in PyTorch's Join.*Join\(\[ddp, "):
            _train(ddp, optim, [optim, ddp], rank)
        assert time.monotonic() - start_s < _TIMEOUT_S / 2
    raise AssertionError("both orders were run")


@pytest.mark.parametrize("make", [_step, _zero_step, _local_sgd])
def test_in_torch_join_an_optimizer_before_its_model_is_refused(make: Callable[[Any], Any]) -> None:
    first, second = run_ranks(_in_torch_join, 2, make, group_timeout_s=_TIMEOUT_S)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
