"""What a user did wrong is named, at construction or first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks, run_threads, wrap
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
    declare,
    hook_with_zero_step,
)

SGD = torch.optim.SGD


# By what is wrong: the parameters and the options, given a model's parameters, and what the error says.
WRONG_ARGUMENTS: dict[str, tuple[Callable[[list[nn.Parameter]], Any], Any, dict[str, Any], str]] = {
    "no parameters": (lambda _: [], SGD, {}, "params is empty"),
    "empty group": (lambda _: [{"params": []}], SGD, {}, "params is empty"),
    "one tensor": (lambda p: p[0], SGD, {}, "iterable of parameters"),
    "twice": (lambda p: [*p, p[0]], SGD, {}, "parameter 10 of group 0 is the same as parameter 0 of group 0"),
    "in two groups": (
        lambda p: [{"params": p}, {"params": p[3]}],
        SGD,
        {},
        "parameter 0 of group 1 is the same as parameter 3",
    ),
    "float": (lambda _: [1.0], SGD, {}, "parameter 0 of group 0 is a float"),
    "not a leaf": (lambda p: [p[0] * 2], SGD, {}, "not a leaf"),
    "group without params": (lambda _: [{"lr": 1.0}], SGD, {}, "group 0 has no 'params'"),
    "class of modules": (lambda p: p, nn.Linear, {}, "subclass of torch.optim.Optimizer"),
    "name of a class": (lambda p: p, "SGD", {}, "subclass of torch.optim.Optimizer"),
    "optimizer, not its class": (lambda p: p, SGD([torch.zeros(1)], lr=0.1), {}, "is a subclass of .* got"),
    "negative rate": (lambda p: p, SGD, {"lr": -1.0}, "SGD: Invalid learning rate"),
    "unknown option": (lambda p: p, SGD, {"learning_rate": 1.0}, "SGD: .*learning_rate"),
    "unknown partition": (lambda p: p, SGD, {"partition": "layer"}, "'element' or 'parameter', got 'layer'"),
    "integer masters": (lambda p: p, SGD, {"master_dtype": torch.int32}, "master_dtype is a floating-point dtype"),
    "gaps in memory": (lambda _: [nn.Parameter(torch.zeros(4, 4)[:, :2])], SGD, {}, "gaps or overlaps"),
    "two devices": (
        lambda _: [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, device="meta"))],
        SGD,
        {},
        "several devices",
    ),
}


def _constructed(rank: int, world_size: int, wrong: str) -> None:
    params, cls, options, match = WRONG_ARGUMENTS[wrong]
    with pytest.raises(ConfigurationError, match=match):
        ZeroRedundancyOptimizer(params(list(MLP.model().parameters())), cls, **options)


@pytest.mark.parametrize("wrong", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_refused(wrong: str) -> None:
    run_threads(_constructed, 2, wrong)


def _added_again(rank: int, world_size: int) -> None:
    parameters = list(MLP.model().parameters())
    zero = ZeroRedundancyOptimizer(parameters[:4], SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match="parameter 0 of group 1 is the same as parameter 2 of group 0"):
        zero.add_param_group({"params": [parameters[2]]})


def test_a_parameter_is_not_added_again() -> None:
    run_threads(_added_again, 2)


def test_the_optimizer_needs_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(2))], SGD)


# By what differs: the parameters and options of a rank, and what the error says.
DIFFERENCES: dict[str, tuple[Callable[[int], Any], Callable[[int], dict[str, Any]], str]] = {
    "shape": (
        lambda rank: [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3 + rank))],
        lambda _: {},
        r"parameter 1 of group 0 .*\(4,\).* on rank 1, .*\(3,\).* on rank 0",
    ),
    "shape, with names": (
        lambda rank: [("head.bias", nn.Parameter(torch.zeros(3 + rank)))],
        lambda _: {},
        r"head.bias .*\(4,\).* on rank 1",
    ),
    "number": (
        lambda rank: [nn.Parameter(torch.zeros(2)) for _ in range(2 - rank)],
        lambda _: {},
        "only 1 parameters on rank 1",
    ),
    "strides": (
        lambda rank: [nn.Parameter(torch.zeros(2, 3).t() if rank == 0 else torch.zeros(3, 2))],
        lambda _: {},
        r"of strides \(2, 1\) on rank 1, .* of strides \(1, 3\) on rank 0",
    ),
    "partition": (
        lambda _: [nn.Parameter(torch.zeros(2))],
        lambda rank: {"partition": "parameter" if rank else "element"},
        r"rank 1 shards with .*parameter.*rank 0 with .*element",
    ),
}


def _different(rank: int, world_size: int, what: str) -> None:
    params, options, match = DIFFERENCES[what]
    with pytest.raises(ConfigurationError, match=match):
        ZeroRedundancyOptimizer(params(rank), SGD, **options(rank))


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_with_different_parameters_are_named(what: str) -> None:
    run_ranks(_different, 2, what)


def _model_and_zero() -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)


def _no_stage(rank: int, world_size: int) -> None:
    _, zero = _model_and_zero()
    with pytest.raises(RegistrationError, match=r"chain\(ZeroStep\(zero\)\)\.register\(ddp\)"):
        zero.step()


def test_step_with_overlap_needs_a_registered_stage() -> None:
    run_ranks(_no_stage, 2)


def _other_model(rank: int, world_size: int) -> None:
    (_, zero), (other, _) = _model_and_zero(), _model_and_zero()
    with pytest.raises(ConfigurationError, match=r"10 of 10 parameters .* not trained by this model"):
        chain(ZeroStep(zero)).register(other)


def _one_parameter_too_many(rank: int, world_size: int) -> None:
    ddp, _ = _model_and_zero()
    more = ZeroRedundancyOptimizer([*ddp.parameters(), nn.Parameter(torch.zeros(3))], SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"1 of 11 .* the first is parameter 10 of group 0"):
        chain(ZeroStep(more)).register(ddp)


def _foreign_group_added(rank: int, world_size: int) -> None:
    ddp, zero = _model_and_zero()
    chain(ZeroStep(zero)).register(ddp)
    with pytest.raises(ConfigurationError, match="not trained by this model"):
        zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def _hook_of_other_model(rank: int, world_size: int) -> None:
    (_, zero), (other, _) = _model_and_zero(), _model_and_zero()
    with pytest.raises(ConfigurationError, match=r"10 parameters .* not in this model"):
        hook_with_zero_step(allreduce_hook, other, zero)


@pytest.mark.parametrize(
    "scenario", [_other_model, _one_parameter_too_many, _foreign_group_added, _hook_of_other_model]
)
def test_parameters_that_the_model_does_not_train_are_refused(scenario: Any) -> None:
    run_ranks(scenario, 2)


def _hook_without_overlap(rank: int, world_size: int) -> None:
    ddp, _ = _model_and_zero()
    with pytest.raises(ConfigurationError, match="overlap_with_ddp=True"):
        hook_with_zero_step(allreduce_hook, ddp, ZeroRedundancyOptimizer(ddp.parameters(), SGD))


def test_hook_with_zero_step_needs_overlap_with_ddp() -> None:
    run_ranks(_hook_without_overlap, 2)


def _other_optimizer(rank: int, world_size: int) -> None:
    ddp, _ = _model_and_zero()
    with pytest.raises(ConfigurationError, match=r"takes an overlap\.ZeroRedundancyOptimizer, got OverlappedOptimizer"):
        ZeroStep(OverlappedOptimizer(SGD(ddp.parameters(), lr=0.1)))  # type: ignore[arg-type]


def test_zero_step_takes_no_other_optimizer() -> None:
    run_ranks(_other_optimizer, 2)


def _wrong_option(rank: int, world_size: int, options: dict[str, Any], match: str) -> None:
    _, zero = _model_and_zero()
    with pytest.raises(ConfigurationError, match=match):
        ZeroStep(zero, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gather": "never"}, "'backward' or 'forward', got 'never'"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be positive"),
    ],
    ids=["gather", "clip_grad_norm"],
)
def test_a_wrong_option_of_the_stage_is_refused(options: dict[str, Any], match: str) -> None:
    run_ranks(_wrong_option, 2, options, match)


def _reducer_afterwards(rank: int, world_size: int) -> None:
    _, zero = _model_and_zero()
    with pytest.raises(ConfigurationError, match="cannot follow"):
        chain(ZeroStep(zero), AllReduce())


def test_no_reducer_follows_the_stage() -> None:
    run_ranks(_reducer_afterwards, 2)


def _other_stage_on_rank_1(rank: int, world_size: int) -> None:
    ddp, zero = _model_and_zero()
    mine = chain(ZeroStep(zero, deferred=True, automatic=rank == 1))
    with pytest.raises(CollectiveError, match=r"rank 1 registers .*deferred, automatic\)"):
        mine.register(ddp)


def test_ranks_with_different_stages_are_named() -> None:
    run_ranks(_other_stage_on_rank_1, 2)


def _fails_and_recovers(rank: int, world_size: int) -> None:
    @declare("element")
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


def _model_not_known(rank: int, world_size: int) -> None:
    ddp = wrap(nn.Sequential(nn.Linear(2, 2)))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    ddp.register_comm_hook(None, as_hook(ZeroStep(zero, gather="forward")))
    with pytest.raises(ConfigurationError, match=r"overlap\.register"):
        ddp(torch.ones(1, 2)).sum().backward()


def test_gathering_in_forward_needs_to_know_the_model() -> None:
    run_ranks(_model_not_known, 1)


def _sparse(rank: int, world_size: int) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    zero = ZeroRedundancyOptimizer(embedding.parameters(), SGD, lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        zero.step()


def test_sparse_gradients_are_refused() -> None:
    run_threads(_sparse, 2)
