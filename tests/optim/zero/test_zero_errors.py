"""What a user did wrong is named, at construction, at registration or at first use."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import on_ranks, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    OverlappedOptimizer,
    RegistrationError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    as_hook,
    chain,
    hook_with_zero_step,
)

SGD = torch.optim.SGD

# What is wrong: the parameters and the options, given a model's parameters, and a part of the error.
WRONG_ARGUMENTS: list[tuple[Callable[[list[nn.Parameter]], Any], Any, dict[str, Any], str]] = [
    (lambda _: [], SGD, {}, "empty parameter list"),
    (lambda _: [{"params": []}], SGD, {}, "needs parameters"),
    (lambda p: [*p, p[0]], SGD, {}, "parameter 10 of group 0 is the same as parameter 0 of group 0"),
    (lambda p: p, nn.Linear, {}, "subclass of torch.optim.Optimizer"),
    (lambda p: p, SGD([torch.zeros(1)], lr=0.1), {}, "is a subclass of .* got"),
    (lambda p: p, SGD, {"lr": -1.0}, "SGD: Invalid learning rate"),
    (lambda p: p, SGD, {"learning_rate": 1.0}, "SGD: .*learning_rate"),
    (lambda p: p, SGD, {"partition": "layer"}, "'element' or 'parameter', got 'layer'"),
    (lambda p: p, SGD, {"master_dtype": torch.int32}, "master_dtype is a floating-point dtype"),
    (lambda p: p, torch.optim.LBFGS, {}, r"step\(closure\)"),
    (lambda p: p, torch.optim.Muon, {}, "Muon: Muon only supports 2D parameters"),
    (lambda _: [nn.Parameter(torch.zeros(4, 4)[:, :2])], SGD, {}, "gaps or overlaps"),
    (lambda _: [nn.Parameter(torch.zeros(4, 4).to_sparse())], SGD, {}, "is stored as torch.sparse_coo.*to_dense"),
    (lambda _: [nn.Parameter(torch.zeros(4, device=d)) for d in ("cpu", "meta")], SGD, {}, "all on one device"),
]

# What differs between ranks: the parameters and options of a rank, and a part of the error.
DIFFERENCES: list[tuple[Callable[[int], Any], Callable[[int], dict[str, Any]], str]] = [
    (
        lambda rank: [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3 + rank))],
        lambda _: {},
        r"parameter 1 of group 0 .*\(4,\).* on rank 1, .*\(3,\).* on rank 0",
    ),
    (
        lambda rank: [("head.bias", nn.Parameter(torch.zeros(3 + rank)))],
        lambda _: {},
        r"head.bias .*\(4,\).* on rank 1",
    ),
    (
        lambda rank: [nn.Parameter(torch.zeros(2)) for _ in range(2 - rank)],
        lambda _: {},
        "no further parameter on rank 1",
    ),
    (
        lambda rank: [nn.Parameter(torch.zeros(2, 3).t() if rank == 0 else torch.zeros(3, 2))],
        lambda _: {},
        r"of strides \(2, 1\) on rank 1, .* of strides \(1, 3\) on rank 0",
    ),
    (
        lambda _: [nn.Parameter(torch.zeros(2))],
        lambda rank: {"partition": "parameter" if rank else "element"},
        "partition='parameter'.* on rank 1, partition='element'.* on rank 0",
    ),
]


def _constructed(rank: int, world_size: int) -> None:
    for params, cls, options, match in WRONG_ARGUMENTS:
        with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match=match):
            ZeroRedundancyOptimizer(params(list(MLP.model().parameters())), cls, **options)
    for of_rank, options_of, match in DIFFERENCES:
        with pytest.raises(ConfigurationError, match=match):
            ZeroRedundancyOptimizer(of_rank(rank), SGD, **options_of(rank))
    parameters = list(MLP.model().parameters())
    zero = ZeroRedundancyOptimizer(parameters[:4], SGD, lr=0.1)
    with pytest.raises(ValueError, match="more than one parameter group"):
        zero.add_param_group({"params": [parameters[2]]})
    embedding = nn.Embedding(4, 2, sparse=True)
    zero = ZeroRedundancyOptimizer(embedding.parameters(), SGD, lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        zero.step()


def test_wrong_arguments_and_ranks_with_different_ones_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2))], SGD)
    run_ranks(_constructed, 2)


def _model_and_zero() -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)


@on_ranks(2)
def test_registrations_that_cannot_work_are_refused(rank: int, world_size: int) -> None:
    ddp, zero = _model_and_zero()
    other, _ = _model_and_zero()
    more = ZeroRedundancyOptimizer([*ddp.parameters(), nn.Parameter(torch.zeros(3))], SGD, lr=0.1)
    without = ZeroRedundancyOptimizer(ddp.parameters(), SGD)
    overlapped: Any = OverlappedOptimizer(SGD(ddp.parameters(), lr=0.1))
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (zero.step, RegistrationError, r"chain\(ZeroStep\(zero\)\)\.register\(ddp\)"),
        (lambda: chain(ZeroStep(zero)).register(other), ConfigurationError, "10 of 10 parameters .* not trained by"),
        (lambda: chain(ZeroStep(more)).register(ddp), ConfigurationError, "1 of 11 .* is parameter 10 of group 0"),
        (lambda: hook_with_zero_step(allreduce_hook, other, zero), ConfigurationError, "10 of 10 .* not trained by"),
        (lambda: hook_with_zero_step(allreduce_hook, ddp, without), ConfigurationError, "overlap_with_ddp=True"),
        (lambda: ZeroStep(overlapped), ConfigurationError, r"takes an overlap\.ZeroRedundancyOptimizer, got Overl"),
        (lambda: ZeroStep(zero, gather="never"), ConfigurationError, "'backward' or 'forward', got 'never'"),
        (lambda: chain(ZeroStep(zero), AllReduce()), ConfigurationError, "cannot follow"),
        (
            chain(ZeroStep(zero, deferred=True, automatic=rank == 1)).register,
            CollectiveError,
            r"rank 1 registers .*deferred, automatic\)",
        ),
    ]
    for act, error, match in refused:
        with pytest.raises(error, match=match):
            act(ddp) if act.__name__ == "register" else act()  # type: ignore[call-arg]
    chain(ZeroStep(zero)).register(ddp)
    with pytest.raises(ConfigurationError, match="not trained by this model"):
        zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    hooked, zero = _model_and_zero()
    hooked.register_comm_hook(None, as_hook(ZeroStep(zero, gather="forward")))
    with pytest.raises(ConfigurationError, match=r"overlap\.register"):
        mean_squared_error(hooked, MLP.batch(0, rank)).backward()
