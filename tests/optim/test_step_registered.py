"""Which model an optimizer is registered with: none, one that is gone, another DDP of the same module."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from step_loops import SGD, NoScheduler, overlapped_ddp, plain_ddp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, on_ranks, overlapped_step, train, wrap
from harness.models import BUCKET_CAP_MB, MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    OverlappedOptimizer,
    RegistrationError,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

FORGOTTEN = r"no stage updates with this SGD's OverlappedOptimizer.*register\(ddp\)"


def _with_gradients(overlapped: OverlappedOptimizer) -> OverlappedOptimizer:
    for group in overlapped.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return overlapped


@on_ranks(2)
def test_what_is_not_registered_updates_nothing_and_what_was_removed_steps_like_the_plain_one(rank: int) -> None:
    ddp, overlapped, registration = overlapped_ddp(MLP, SGD)
    train(ddp, overlapped, MLP.batches(rank, steps=2), step_fn=overlapped_step, scheduler=NoScheduler)
    forgotten = OverlappedOptimizer(SGD(wrap(MLP.model()).parameters()))
    for unregistered in (forgotten, copy.deepcopy(overlapped), pickle.loads(pickle.dumps(overlapped))):
        before = [p.detach().clone() for group in unregistered.param_groups for p in group["params"]]
        with pytest.raises(TrainingLoopError, match=FORGOTTEN):
            _with_gradients(unregistered).step()
        after = [p.detach() for group in unregistered.param_groups for p in group["params"]]
        assert_parity(after, before, what="parameters after a forgotten register(ddp)")
    registration.remove()
    for stepped in (overlapped, copy.deepcopy(overlapped)):
        _with_gradients(stepped)
        before = [p.detach().clone() for group in stepped.param_groups for p in group["params"]]
        stepped.step()
        after = [p for group in stepped.param_groups for p in group["params"]]
        assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_zero_gradients_make_the_state_before_anything_is_registered() -> None:
    layer = nn.Linear(2, 2)
    overlapped = OverlappedOptimizer(torch.optim.AdamW(layer.parameters(), lr=0.0))
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    overlapped.step()
    assert len(overlapped.state) == 2


@on_ranks(2)
def test_a_model_that_the_optimizer_does_not_fit_is_refused(rank: int, world_size: int) -> None:
    first, second = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    with pytest.raises(ConfigurationError, match="no parameter of this model; build it from"):
        chain(AllReduce(), Step(SGD(second.parameters()))).register(first)
    outside = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match="1 parameters of the SGD are not in this model"):
        chain(AllReduce(), Step(SGD([*first.parameters(), outside]))).register(first)
    optimizer = OverlappedOptimizer(SGD([*first.parameters(), *second.parameters()]))
    stages = chain(AllReduce(), Step(optimizer))
    stages.register(first)
    with pytest.raises(RegistrationError, match="serves a model already; make a Step for each model"):
        stages.register(second)


@on_ranks(2)
def test_a_second_ddp_of_the_same_module_needs_the_first_one_removed_or_gone(rank: int, world_size: int) -> None:
    module = MLP.model()
    for automatic in (False, True):
        first = DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB)
        plain = SGD(first.parameters())
        optimizer = plain if automatic else OverlappedOptimizer(plain)
        registration = chain(AllReduce(), Step(optimizer)).register(first)
        second = DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB)
        with pytest.raises(RegistrationError, match=r"another DistributedDataParallel .*\.remove\(\)"):
            chain(AllReduce(), Step(optimizer)).register(second)
        registration.remove()
        chain(AllReduce(), Step(optimizer)).register(second).remove()
        # A model that is gone stands in nobody's way.
        third = DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB)
        chain(AllReduce(), Step(optimizer)).register(third)
        del first, registration, third
        chain(AllReduce(), Step(optimizer)).register(second).remove()


@on_ranks(2)
def test_the_wrapped_optimizers_own_step_is_refused_while_a_stage_updates_with_it(rank: int, world_size: int) -> None:
    for deferred in (False, True):
        ddp, overlapped, registration = overlapped_ddp(MLP, SGD, deferred=deferred)
        (batch,) = MLP.batches(rank, steps=1)
        mean_squared_error(ddp, batch).backward()
        with pytest.raises(TrainingLoopError, match=r"SGD is stepped by .* call step\(\) of the OverlappedOptimizer"):
            overlapped.optimizer.step()
        overlapped.step()
        registration.remove()
        overlapped.optimizer.step()


@on_ranks(2)
def test_the_guard_of_a_plain_optimizer_ends_with_the_model(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=4)
    reference = train(*plain_ddp(MLP, SGD), batches, scheduler=NoScheduler)
    module = MLP.model()
    ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = SGD(module.parameters())
    stage = Step(optimizer)
    kept: list[Any] = [stage, chain(AllReduce(), stage).register(ddp)]
    for batch in batches[:2]:
        mean_squared_error(ddp, batch).backward()
    with pytest.raises(TrainingLoopError, match="leave the call out"):
        optimizer.step()
    del ddp
    gc.disable()  # The guard looks by itself.
    ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB)
    records = train(ddp, optimizer, batches[2:], scheduler=NoScheduler)
    gc.enable()
    assert_parity(records[-1].parameters, reference[-1].parameters, what="a new plain loop with the same optimizer")
    assert len(kept) == 2


@on_ranks(2)
def test_ranks_with_other_hyperparameters_or_groups_are_refused_with_both_values(rank: int) -> None:
    def refused(make: Any) -> str:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = make(list(ddp.parameters()))
        is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
        stages = [ZeroStep(optimizer)] if is_sharded else [AllReduce(), Step(OverlappedOptimizer(optimizer))]
        with pytest.raises(CollectiveError) as raised:
            chain(*stages).register(ddp)
        return str(raised.value)

    def grouped(parameters: list[Any]) -> Any:
        cut = 2 + rank
        return torch.optim.AdamW([{"params": parameters[:cut]}, {"params": parameters[cut:], "lr": 1e-3}])

    rate = 0.1 * (1 + rank)
    assert "lr of group 0 of AdamW is 0.2 on rank 1, but 0.1 on rank 0" in refused(lambda p: torch.optim.AdamW(p, rate))
    assert "the list of parameters of group 0 of AdamW is 0.weight, 0.bias" in refused(grouped)
    sharded = refused(lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=rate))
    assert "lr of group 0 of SGD is 0.2 on rank 1, but 0.1 on rank 0" in sharded
