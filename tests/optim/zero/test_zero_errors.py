"""What a user did wrong is named, at construction or first use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks, run_threads, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    OverlappedOptimizer,
    RegistrationError,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    chain,
    hook_with_zero_step,
)

SGD = torch.optim.SGD


def _construction(rank: int, world_size: int) -> None:
    model = MLP.model()
    parameters = list(model.parameters())
    for params, cls, options, match in (
        ([], SGD, {}, "params is empty"),
        ([{"params": []}], SGD, {}, "params is empty"),
        (parameters[0], SGD, {}, "iterable of parameters"),
        ([*parameters, parameters[0]], SGD, {}, "parameter 10 of group 0 is parameter 0 of group 0 once more"),
        ([{"params": parameters}, {"params": parameters[3]}], SGD, {}, "parameter 0 of group 1 is parameter 3"),
        ([1.0], SGD, {}, "parameter 0 of group 0 is a float"),
        ([parameters[0] * 2], SGD, {}, "no leaf"),
        ([{"lr": 1.0}], SGD, {}, "group 0 has no 'params'"),
        (parameters, nn.Linear, {}, "subclass of torch.optim.Optimizer"),
        (parameters, "SGD", {}, "subclass of torch.optim.Optimizer"),
        (parameters, SGD(parameters, lr=0.1), {}, "is a class, but got an object"),
        (parameters, SGD, {"lr": -1.0}, "SGD: Invalid learning rate"),
        (parameters, SGD, {"learning_rate": 1.0}, "SGD: .*learning_rate"),
        (parameters, SGD, {"partition": "layer"}, "'element' or 'parameter', got 'layer'"),
        (parameters, SGD, {"master_dtype": torch.int32}, "master_dtype is a floating-point dtype"),
        (parameters, torch.optim.Adafactor, {}, "partition='parameter'"),
        (parameters, torch.optim.LBFGS, {}, "partition='parameter'"),
        (parameters, torch.optim.LBFGS, {"partition": "parameter"}, "step\\(closure\\)"),
        (parameters, torch.optim.SparseAdam, {}, "sparse gradients"),
        ([nn.Parameter(torch.zeros(4, 4)[:, :2])], SGD, {}, "gaps or overlaps"),
        ([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, device="meta"))], SGD, {}, "several devices"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            ZeroRedundancyOptimizer(params, cls, **options)  # type: ignore[arg-type]
    zero = ZeroRedundancyOptimizer(parameters[:4], SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match="parameter 0 of group 1 is parameter 2 of group 0"):
        zero.add_param_group({"params": [parameters[2]]})


def test_arguments_are_checked() -> None:
    run_threads(_construction, 2)


def test_it_needs_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2))], SGD)


def _different(rank: int, world_size: int) -> None:
    mine = nn.Parameter(torch.zeros(3 + rank))
    with pytest.raises(ConfigurationError, match=r"parameter 1 of group 0 .*\(4,\).* on rank 1, .*\(3,\).* on rank 0"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2)), mine], SGD)
    with pytest.raises(ConfigurationError, match=r"head.bias .*\(4,\).* on rank 1"):
        ZeroRedundancyOptimizer([("head.bias", mine)], SGD)
    with pytest.raises(ConfigurationError, match="only 1 parameters on rank 1"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2)) for _ in range(2 - rank)], SGD)
    with pytest.raises(ConfigurationError, match=r"of strides \(2, 1\) on rank 1, .* of strides \(1, 3\) on rank 0"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2, 3).t() if rank == 0 else torch.zeros(3, 2))], SGD)
    with pytest.raises(ConfigurationError, match=r"rank 1 shards with .*parameter.*rank 0 with .*element"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2))], SGD, partition="parameter" if rank else "element")


def test_different_parameters_on_different_ranks_are_named() -> None:
    run_ranks(_different, 2)


def _registration(rank: int, world_size: int) -> None:
    ddp, other = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(RegistrationError, match=r"chain\(ZeroStep\(zero\)\)\.register\(ddp\)"):
        zero.step()
    with pytest.raises(ConfigurationError, match=r"10 of 10 parameters .* not trained by this model"):
        chain(ZeroStep(zero)).register(other)
    more = ZeroRedundancyOptimizer([*ddp.parameters(), nn.Parameter(torch.zeros(3))], SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"1 of 11 .* the first is parameter 10 of group 0"):
        chain(ZeroStep(more)).register(ddp)
    registration = chain(ZeroStep(zero)).register(ddp)
    with pytest.raises(ConfigurationError, match="not trained by this model"):
        zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigurationError, match=r"10 parameters .* not in this model"):
        hook_with_zero_step(allreduce_hook, other, zero)
    with pytest.raises(ConfigurationError, match="overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, other, ZeroRedundancyOptimizer(other.parameters(), SGD))
    registration.remove()
    plain = OverlappedOptimizer(SGD(ddp.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="takes a ZeroRedundancyOptimizer, got OverlappedOptimizer"):
        ZeroStep(plain)  # type: ignore[arg-type]
    for options, match in (
        ({"gather": "never"}, "'backward' or 'forward', got 'never'"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be positive"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            ZeroStep(zero, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cannot follow"):
        chain(ZeroStep(zero), AllReduce())
    # Rank 0's plan is the one that the others are compared with.
    mine = chain(ZeroStep(zero, deferred=True, automatic=rank == 1))
    if rank == 0:
        mine.register(ddp).remove()
    else:
        with pytest.raises(CollectiveError, match=r"rank 1 registers .*deferred, automatic\)"):
            mine.register(ddp)


def test_registration_is_checked() -> None:
    run_ranks(_registration, 2)


def _loop(rank: int, world_size: int, options: dict[str, Any]) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, **options)).register(ddp)

    def backward(step: int) -> None:
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()

    zero.step()  # Nothing to do yet.
    backward(0)
    with pytest.raises(TrainingLoopError, match="second backward"):
        backward(1)
    backward(2)
    if not options.get("deferred"):
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        with pytest.raises(TrainingLoopError, match="changed between backward"):
            zero.step()
        zero.zero_grad()
    zero.step()
    zero.step()  # What has been applied is left alone.
    with ddp.no_sync():
        backward(3)
    with pytest.raises(TrainingLoopError, match="not reduced"):
        zero.step()
    zero.zero_grad()
    ddp(*MLP.batch(3, rank).inputs)
    ddp.module[4:](torch.ones(1, 16)).sum().backward()  # The first layers take no part.
    with pytest.raises(TrainingLoopError, match=r"not reached every parameter.*0\.weight"):
        zero.step()


@pytest.mark.parametrize("options", [{}, {"deferred": True}, {"gather": "forward"}], ids=str)
def test_calls_in_an_order_that_loses_or_repeats_an_update_are_errors(options: dict[str, Any]) -> None:
    run_ranks(_loop, 2, options)


def _fails_and_recovers(rank: int, world_size: int) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("out of order")
            return super().step(closure)

    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), Failing, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(5):
        Failing.fails = step == 2
        if step == 2:
            with pytest.raises(ValueError, match="out of order") as caught:
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            assert "ZeroStep(Failing" in caught.value.__notes__[0]
            assert "load a checkpoint" in caught.value.__notes__[1]
            continue
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()


def test_an_update_that_raises_is_named_and_the_model_works_afterwards() -> None:
    run_ranks(_fails_and_recovers, 2)


def _compiled(rank: int, world_size: int) -> None:
    ddp = wrap(nn.Sequential(nn.Linear(2, 2)))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    ddp.register_comm_hook(None, _as_hook(ZeroStep(zero, gather="forward")))
    with pytest.raises(ConfigurationError, match=r"overlap\.register"):
        ddp(torch.ones(1, 2)).sum().backward()


def _as_hook(stage: Any) -> Any:
    from overlap import as_hook

    return as_hook(stage)


def test_gathers_that_ride_need_the_model() -> None:
    run_ranks(_compiled, 1)


def test_sparse_gradients_are_refused() -> None:
    def alone(rank: int, world_size: int) -> None:
        embedding = nn.Embedding(4, 2, sparse=True)
        zero = ZeroRedundancyOptimizer(embedding.parameters(), SGD, lr=0.1)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(UnsupportedError, match="sparse=False"):
            zero.step()

    run_threads(alone, 2)
