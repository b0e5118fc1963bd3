"""Classes under PyTorch's names pass PyTorch's ``isinstance`` tests, and what frameworks do after such a test works."""

import copy
import pickle

import pytest
from torch.distributed.algorithms import join as torch_join
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers

import overlap
from overlap import ConfigurationError
from overlap._torch import classes as torch_classes
from overlap.hooks import PostLocalSGDState, post_localSGD_hook, powerSGD_hook
from overlap.optim import local_sgd

# PyTorch's class, ours, and what is public in PyTorch's and deliberately absent in ours.
PAIRS: dict[str, tuple[type, type, set[str]]] = {
    # The inherited function notifies either.
    "Join": (torch_join.Join, overlap.Join, {"notify_join_context"}),
    "ModelAverager": (torch_averagers.ModelAverager, local_sgd.ModelAverager, set()),
    "PeriodicModelAverager": (torch_averagers.PeriodicModelAverager, local_sgd.PeriodicModelAverager, set()),
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
