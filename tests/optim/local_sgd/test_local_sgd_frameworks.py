"""Classes under PyTorch's names pass PyTorch's ``isinstance`` tests, and what frameworks do after such a test works."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch.distributed as dist
from local_loops import sgd, values_of
from torch import Tensor
from torch.distributed.algorithms import join as torch_join
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_hierarchical
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import ConfigurationError
from overlap._torch import classes as torch_classes
from overlap.hooks import PostLocalSGDState, post_localSGD_hook, powerSGD_hook
from overlap.optim import local_sgd

# PyTorch's class, ours, and what is public in PyTorch's and deliberately absent in ours.
PAIRS: dict[str, tuple[type, type, set[str]]] = {
    "Join": (torch_join.Join, overlap.Join, set()),
    "Joinable": (torch_join.Joinable, overlap.Joinable, set()),
    "JoinHook": (torch_join.JoinHook, overlap.JoinHook, set()),
    "ModelAverager": (torch_averagers.ModelAverager, local_sgd.ModelAverager, set()),
    "PeriodicModelAverager": (torch_averagers.PeriodicModelAverager, local_sgd.PeriodicModelAverager, set()),
    "HierarchicalModelAverager": (
        torch_hierarchical.HierarchicalModelAverager,
        local_sgd.HierarchicalModelAverager,
        set(),
    ),
    "PostLocalSGDOptimizer": (torch_classes.PostLocalSGDOptimizer, local_sgd.PostLocalSGDOptimizer, set()),
    "PostLocalSGDState": (
        torch_post_local.PostLocalSGDState,
        PostLocalSGDState,
        {"process_group", "subgroup", "start_localSGD_iter", "post_local_gradient_allreduce", "iter"},
    ),
    "PowerSGDState": (
        torch_power.PowerSGDState,
        overlap.PowerSGDState,
        # How PyTorch's hook works inside; the others are attributes of the object.
        {"rng", "p_memory_dict", "q_memory_dict", "next_stats_report"} | set(vars(overlap.PowerSGDState(None))),
    ),
    "ZeroRedundancyOptimizer": (torch_classes.ZeroRedundancyOptimizer, overlap.ZeroRedundancyOptimizer, set()),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_class_under_a_name_of_pytorch_passes_its_isinstance_test_and_defines_all_that_is_public(name: str) -> None:
    theirs, ours, attributes = PAIRS[name]
    assert issubclass(ours, theirs)
    of_ours = {key for cls in ours.__mro__ if cls.__module__.startswith("overlap") for key in vars(cls)}
    public = {key for cls in theirs.__mro__ if cls.__module__.startswith("torch.distributed") for key in vars(cls)}
    public = {key for key in public if not key.startswith("_") or key in ("__init__", "__getstate__", "__setstate__")}
    assert public - of_ours - attributes == set(), "defined by PyTorch's class alone"


def test_states_keep_their_attributes_to_themselves_and_are_pickled_whole() -> None:
    local = PostLocalSGDState(None, None, start_localSGD_iter=3)
    power = overlap.PowerSGDState(None, matrix_approximation_rank=4)
    for state in (local, power):
        for twin in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
            assert type(twin) is type(state) and set(vars(twin)) == set(vars(state))
    assert vars(local)["start_localSGD_iter"] == 3 and vars(power)["matrix_approximation_rank"] == 4
    assert not hasattr(power, "rng")


def test_pytorchs_own_state_is_named_where_ours_is_needed() -> None:
    with pytest.raises(ConfigurationError, match=r"of overlap\.hooks, got PyTorch's PostLocalSGDState"):
        post_localSGD_hook.stage(torch_post_local.PostLocalSGDState(None, None, 3))
    with pytest.raises(ConfigurationError, match="PowerSGDState, got PyTorch's PowerSGDState"):
        powerSGD_hook.stage(torch_power.PowerSGDState(None))


class StrategyWithAverager:
    """What Lightning's ``DDPStrategy(ddp_comm_state=, ddp_comm_hook=, model_averaging_period=)`` does, in its order."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Any, state: Any, hook: Any, period: int) -> None:
        assert hook.__qualname__  # It logs the name.
        ddp.register_comm_hook(state=state, hook=hook)
        self._ddp, self._optimizer = ddp, optimizer
        self._averager: Any = None
        if not isinstance(state, torch_post_local.PostLocalSGDState):
            return
        self._averager = torch_averagers.PeriodicModelAverager(period=period, warmup_steps=state.start_localSGD_iter)

    def training_step(self, batch: Any) -> None:
        def closure() -> Tensor:
            self._optimizer.zero_grad()
            loss = mean_squared_error(self._ddp, batch)
            loss.backward()
            return loss

        self._optimizer.step(closure)
        if self._averager is not None:
            groups = self._optimizer.param_groups
            self._averager.average_parameters(iter([p for g in groups for p in g["params"] if p.grad is not None]))


def _strategy(rank: int, world_size: int) -> None:
    ends = []
    for of in (torch_post_local, overlap.hooks.post_local_sgd):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        subgroups = [dist.new_group([each]) for each in range(world_size)]
        state = of.PostLocalSGDState(process_group=None, subgroup=subgroups[rank], start_localSGD_iter=3)
        strategy = StrategyWithAverager(ddp, sgd(ddp.parameters()), state, of.post_localSGD_hook, period=2)
        for step in range(8):
            strategy.training_step(MLP.batch(step, rank))
        ends.append(values_of(ddp))
    assert_parity(ends[1], ends[0], what="beside PyTorch's own state and hook")
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, ends[1])
    assert_parity(everyone[0], everyone[1], what="rank 0 beside rank 1")


def test_a_strategy_that_averages_where_the_state_is_pytorchs_leaves_all_ranks_equal() -> None:
    run_ranks(_strategy, 2)
