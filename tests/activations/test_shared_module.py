"""A wrapped module shares everything with the module that was wrapped; what cannot be wrapped is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from activations.wrappers import WRAPPERS
from harness import assert_parity, run_ranks
from overlap import ConfigurationError, UnsupportedError
from overlap.activations import Checkpointed, Offloaded, checkpoint_wrapper, offload_wrapper

Pair = tuple[nn.Sequential, nn.Sequential]


@pytest.fixture(params=WRAPPERS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """A plain module and what one of the wrappers returns for it."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapped = WRAPPERS[request.param](plain)
    assert isinstance(wrapped, nn.Sequential)
    return plain, wrapped


def test_only_the_wrapped_module_is_an_instance_of_the_wrapper(pair: Pair) -> None:
    plain, wrapped = pair
    assert isinstance(wrapped, Checkpointed | Offloaded)
    assert not isinstance(plain, Checkpointed | Offloaded)


def test_names_of_parameters_buffers_and_modules_are_the_same(pair: Pair) -> None:
    inner, outer = (nn.ModuleDict({"layer": module}) for module in pair)
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        assert [key for key, _ in of(outer)] == [key for key, _ in of(inner)]
    assert [key for key, _ in outer.named_modules()] == [key for key, _ in inner.named_modules()]
    assert list(outer.state_dict()) == list(inner.state_dict())


def test_it_has_the_length_and_items_of_the_module(pair: Pair) -> None:
    plain, wrapped = pair
    assert len(wrapped) == 3 and wrapped[0] is plain[0] and wrapped[:2][1] is plain[1]


def test_models_with_and_without_wrappers_load_each_others_state(pair: Pair) -> None:
    inner, outer = (nn.ModuleDict({"layer": module}) for module in pair)
    inner.load_state_dict(outer.state_dict())
    outer.load_state_dict(nn.ModuleDict({"layer": copy.deepcopy(pair[0])}).state_dict())


def test_mode_dtype_and_new_attributes_are_shared(pair: Pair) -> None:
    plain, wrapped = pair
    wrapped.eval().double()
    assert not plain.training and plain[0].weight.dtype == torch.float64
    plain.answer = 42
    assert wrapped.answer == 42


@pytest.mark.parametrize("how", ["pickled", "deep"])
def test_a_copy_is_wrapped_and_independent(pair: Pair, how: str) -> None:
    plain, wrapped = pair
    wrapped.eval().double()
    plain.answer = 42
    twin = pickle.loads(pickle.dumps(wrapped)) if how == "pickled" else copy.deepcopy(wrapped)
    assert type(twin) is type(wrapped) and twin.answer == 42
    assert_parity(twin.state_dict(), plain.state_dict(), what="a copy")
    twin[0].weight.data.zero_()
    assert plain[0].weight.any()
    assert twin(torch.ones(2, 4, dtype=torch.float64)).requires_grad


# What is refused ---------------------------------------------------------------------------------------------


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"is not an nn.Module"):
        checkpoint_wrapper(torch.relu)  # type: ignore[arg-type]


def test_a_module_without_forward_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ModuleList has no forward; wrap the modules in it"):
        offload_wrapper(nn.ModuleList())


def test_a_module_whose_forward_was_replaced_on_the_instance_is_refused() -> None:
    patched = nn.ReLU()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="forward of this ReLU was replaced on the instance"):
        checkpoint_wrapper(patched)


def test_a_lazy_module_is_wrapped_after_its_first_call() -> None:
    lazy = nn.LazyLinear(2)
    with pytest.raises(UnsupportedError, match=r"LazyLinear has parameters without a shape.*call it once"):
        checkpoint_wrapper(lazy)
    lazy(torch.ones(1, 3))
    assert checkpoint_wrapper(lazy)(torch.ones(1, 3)).shape == (1, 2)


def test_a_module_that_compiles_its_call_is_refused() -> None:
    compiled = nn.ReLU()
    compiled.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="has been compiled"):
        checkpoint_wrapper(compiled)


def test_what_torch_compile_returns_is_refused() -> None:
    compiled = torch.compile(nn.Sequential(nn.ReLU()), backend="eager")
    with pytest.raises(UnsupportedError, match="wrap the module first and compile it then"):
        checkpoint_wrapper(compiled)  # type: ignore[arg-type]


def test_a_model_with_ddp_in_it_is_refused() -> None:
    def refused(rank: int, world_size: int) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(UnsupportedError, match="DistributedDataParallel in it"):
            offload_wrapper(nn.Sequential(ddp))
        with pytest.raises(UnsupportedError, match="DDP last"):
            checkpoint_wrapper(ddp)

    run_ranks(refused, 1)


def test_a_bad_option_is_named() -> None:
    with pytest.raises(ConfigurationError, match="min_bytes is -1"):
        offload_wrapper(nn.ReLU(), min_bytes=-1)
    with pytest.raises(ConfigurationError, match="offload_to_cpu is 'yes'"):
        checkpoint_wrapper(nn.ReLU(), "yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="determinism_check is 'maybe'"):
        checkpoint_wrapper(nn.ReLU(), determinism_check="maybe")  # type: ignore[arg-type]
