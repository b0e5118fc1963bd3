"""PyTorch's names for post-local SGD: averagers, the optimizer and the hook, beside PyTorch's own."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import Values, mean_of, sgd, values_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, run_ranks, run_threads, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import AllReduce, ConfigurationError, Step, chain
from overlap.hooks.post_local_sgd import PostLocal, PostLocalSGDState, post_localSGD_hook
from overlap.optim.local_sgd import (
    Average,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)

# PeriodicModelAverager.


def _averager_parity(rank: int, world_size: int, period: int, warmup: int) -> None:
    from torch.distributed.algorithms.model_averaging import averagers as theirs

    def run(averager: Any) -> list[dict[str, Tensor]]:
        model = MLP.model()
        optimizer = sgd(model.parameters())
        records = []
        for step in range(30):
            optimizer.zero_grad()
            mean_squared_error(model, MLP.batch(step, rank)).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
            records.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return records

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = run(PeriodicModelAverager(period, warmup))
        reference = run(theirs.PeriodicModelAverager(period, warmup))
    assert_parity(ours, reference, what=f"period {period}")


@pytest.mark.parametrize(("period", "warmup"), [(1, 0), (4, 6)])
def test_the_periodic_averager_does_what_pytorchs_does(period: int, warmup: int) -> None:
    run_ranks(_averager_parity, 2, period, warmup)


def _period_one(rank: int, world_size: int) -> None:
    with pytest.warns(UserWarning, match="plain DDP is faster"):
        PeriodicModelAverager(1)


def test_averaging_after_every_step_warns() -> None:
    run_threads(_period_one, 1)


def test_an_averager_needs_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        PeriodicModelAverager(2)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "period": (lambda: PeriodicModelAverager(0), "period must be a whole number of at least 1, got 0"),
    "bool": (lambda: PeriodicModelAverager(True), "got True"),
    "warmup_steps": (
        lambda: PeriodicModelAverager(2, -1), "warmup_steps must be a whole number of at least 0, got -1",
    ),
    "class of optimizer": (
        lambda: PostLocalSGDOptimizer(torch.optim.SGD, PeriodicModelAverager(2)), "the class SGD",  # type: ignore[arg-type]
    ),
    "class of averager": (
        lambda: PostLocalSGDOptimizer(torch.optim.SGD([torch.ones(1)]), PeriodicModelAverager),  # type: ignore[arg-type]
        "takes a ModelAverager",
    ),
    "stage": (lambda: Average(AllReduce()), "takes a ModelAverager"),  # type: ignore[arg-type]
}  # fmt: skip


def _wrong(rank: int, world_size: int, name: str) -> None:
    make, match = WRONG[name]
    with pytest.raises(ConfigurationError, match=match):
        make()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    run_threads(_wrong, 1, name)


# HierarchicalModelAverager.


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


def test_the_longest_period_that_is_due_decides_which_group_averages() -> None:
    run_ranks(_hierarchy, 4)


def _wrong_hierarchies(rank: int, world_size: int) -> None:
    for wrong, match in (
        ({2: 2}, "the last size"),  # The largest size is everyone, as in PyTorch's.
        ({2: 3, 4: 4}, "3 does not divide 4"),
        ({4: 2, 2: 4}, "periods of period_group_size_dict must ascend"),
        ({2: 4, 4: 2}, "sizes of period_group_size_dict must ascend"),
        ({0: 4}, "whole number of at least 1"),
        ({}, "is empty"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            HierarchicalModelAverager(wrong)


def test_periods_and_sizes_that_do_not_fit_are_refused() -> None:
    run_ranks(_wrong_hierarchies, 4)


def _part_of_the_job(rank: int, world_size: int) -> None:
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.raises(ConfigurationError, match="only be made by all ranks of the job"):
        HierarchicalModelAverager({1: 1, 2: 2}, process_group=pairs[rank // 2])


def test_a_hierarchy_of_part_of_the_job_is_refused() -> None:
    run_ranks(_part_of_the_job, 4)


# PostLocalSGDOptimizer.


def _stepped(rank: int) -> tuple[nn.Module, torch.optim.SGD, PostLocalSGDOptimizer]:
    """A model after one step with a closure; its averager averages at the second step from now."""
    model = BATCH_NORM.model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2))
    _step(rank, model, wrapped)
    return model, inner, wrapped


def _step(rank: int, model: nn.Module, wrapped: PostLocalSGDOptimizer) -> float:
    def closure() -> Tensor:
        wrapped.zero_grad()
        loss = mean_squared_error(model, MLP.batch(0, rank))
        loss.backward()
        return loss

    return float(wrapped.step(closure).item())


def _closure(rank: int, world_size: int) -> None:
    model, inner, wrapped = _stepped(rank)
    calls: list[str] = []
    wrapped.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    assert _step(rank, model, wrapped) > 0
    assert calls == ["pre", "post"]


def test_step_takes_a_closure_and_runs_hooks_of_either_optimizer() -> None:
    run_ranks(_closure, 2)


def _shared(rank: int, world_size: int) -> None:
    model, inner, wrapped = _stepped(rank)
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)
    _step(rank, model, wrapped)
    schedule.step()
    assert wrapped.defaults is inner.defaults and inner.param_groups[0]["lr"] == 0.05
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert wrapped.param_groups is inner.param_groups
    wrapped.param_groups[0]["lr"] = 0.01
    assert inner.param_groups[0]["lr"] == 0.01


def test_groups_and_defaults_stay_those_of_the_wrapped_optimizer() -> None:
    run_ranks(_shared, 2)


def _state(rank: int, world_size: int) -> None:
    _, inner, wrapped = _stepped(rank)
    saved = copy.deepcopy(wrapped.state_dict())
    assert saved["step"] == 1
    inner.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    wrapped.averager.step = 5
    wrapped.load_state_dict(saved)
    assert wrapped.averager.step == 1
    with pytest.warns(
        UserWarning,
        match="does not contain a step counter for an averager. Setting step counter to 0.",
    ):
        wrapped.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    assert wrapped.averager.step == 0


def test_the_state_holds_the_averagers_step_and_warns_where_it_is_missing() -> None:
    run_ranks(_state, 2)


def _skipped(rank: int, world_size: int) -> None:
    """A gradient that is not finite on one rank: that rank updates nothing, and averages with the others."""
    model, inner, wrapped = _stepped(rank)
    wrapped.averager.step = 0
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 8.0 if rank == 0 else float("inf"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    momenta = [inner.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    stepped = [p - 0.1 * (0.9 * m + 2.0) if rank == 0 else p for p, m in zip(before, momenta, strict=True)]
    scaler.scale(torch.zeros(()))  # So that there is a scale.
    scaler.step(wrapped)
    assert_parity(
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        mean_of({name: value for (name, _), value in zip(model.named_parameters(), stepped, strict=True)}),
        what="a step that GradScaler skips on one rank",
        exact=False,
        rtol=1e-6,
        atol=1e-7,
        reason="the update is written as another expression",
    )


def test_a_rank_whose_step_is_skipped_by_grad_scaler_still_averages() -> None:
    run_ranks(_skipped, 2)


# The hook and its stage.


def _register_hook(ddp: DistributedDataParallel, state: PostLocalSGDState) -> None:
    ddp.register_comm_hook(state, post_localSGD_hook)


def _register_stage(ddp: DistributedDataParallel, state: PostLocalSGDState) -> None:
    chain(PostLocal(state)).register(ddp)


def _hook_parity(rank: int, world_size: int, averages_in_pairs: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TheirAverager

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its package uses torch.jit.
        from torch.distributed.optim import PostLocalSGDOptimizer as TheirOptimizer

    def train(ddp: DistributedDataParallel, optimizer: Any) -> list[Values]:
        records = []
        for step in range(10):
            optimizer.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            optimizer.step()
            records.append(values_of(ddp.module))
        return records

    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    subgroup = pairs[rank // 2]
    state = theirs.PostLocalSGDState(None, subgroup, 4, averages_in_pairs)
    ddp = wrap(MLP.model())
    ddp.register_comm_hook(state, theirs.post_localSGD_hook)
    reference = train(ddp, TheirOptimizer(sgd(ddp.parameters()), TheirAverager(3, warmup_steps=4)))
    for register in (_register_hook, _register_stage):
        ours = PostLocalSGDState(None, subgroup, 4, averages_in_pairs)
        ddp = wrap(MLP.model())
        register(ddp, ours)
        candidate = train(ddp, PostLocalSGDOptimizer(sgd(ddp.parameters()), PeriodicModelAverager(3, 4)))
        assert ours.iter == state.iter == 4
        assert_parity(
            candidate, reference, what=register.__name__, exact=False, rtol=1e-4, atol=1e-6,
            reason="Gloo adds three and more in another order",
        )  # fmt: skip


@pytest.mark.parametrize("averages_in_pairs", [True, False])
def test_hook_and_optimizer_do_what_pytorchs_do(averages_in_pairs: bool) -> None:
    run_ranks(_hook_parity, 4, averages_in_pairs)


def test_a_pickled_hook_is_the_hook_itself() -> None:
    assert pickle.loads(pickle.dumps(post_localSGD_hook)) is post_localSGD_hook


def _machine(rank: int, world_size: int) -> None:
    state = PostLocalSGDState(None, None, 0)
    ddp = wrap(MLP.model())
    ddp.register_comm_hook(state, post_localSGD_hook)
    assert state.subgroup is None
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    assert state.subgroup is not None and state.subgroup.size() == world_size


def test_the_subgroup_of_a_machine_is_made_in_the_first_local_pass() -> None:
    run_ranks(_machine, 2)


def test_a_wrong_state_or_reducer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_localSGD_iter must be a whole number of at least 0, got -1"):
        PostLocalSGDState(None, None, -1)
    with pytest.raises(ConfigurationError, match=r"must be a PostLocalSGDState of overlap\.hooks, got NoneType"):
        post_localSGD_hook.stage(None)
    with pytest.raises(ConfigurationError, match="is not a reducer"):
        PostLocal(PostLocalSGDState(None, None, 0), Step(sgd(nn.Linear(1, 1).parameters())))


# Average.


def _last_stage(rank: int, world_size: int) -> None:
    def local_reducer() -> PostLocal:
        return PostLocal(PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False))

    ddp, other = wrap(MLP.model()), wrap(MLP.model())
    chain(local_reducer(), Step(sgd(ddp.parameters())), Average(PeriodicModelAverager(2))).register(ddp)
    chain(local_reducer()).register(other)
    optimizer, averager = sgd(other.parameters()), PeriodicModelAverager(2)
    for step in range(6):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        optimizer.zero_grad()
        mean_squared_error(other, MLP.batch(step, rank)).backward()
        optimizer.step()
        averager.average_parameters(other.parameters())
        assert_parity(values_of(ddp.module), values_of(other.module), what=f"step {step}")


def test_average_as_the_last_stage_is_an_averager_called_after_the_step() -> None:
    run_ranks(_last_stage, 2)
