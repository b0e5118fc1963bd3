"""A wrapped module shares everything with the module that was wrapped; unsupported modules are refused."""

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, run_ranks
from overlap import ConfigurationError, UnsupportedError
from overlap.activations import (
    Checkpointed,
    Offloaded,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "checkpoint, arguments offloaded": functools.partial(checkpoint_wrapper, offload_to_cpu=True),
    "offload": offload_wrapper,
}
Pair = tuple[nn.Sequential, nn.Sequential]


@pytest.fixture(params=WRAPPERS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """A plain module and the module that one of the wrappers returns for it."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapped = WRAPPERS[request.param](plain)
    assert isinstance(wrapped, nn.Sequential)
    return plain, wrapped


def test_a_wrapped_module_has_the_classes_names_and_items_of_the_module(pair: Pair) -> None:
    plain, wrapped = pair
    assert isinstance(wrapped, Checkpointed | Offloaded) and not isinstance(plain, Checkpointed | Offloaded)
    inner, outer = (nn.ModuleDict({"layer": module}) for module in pair)
    assert list(outer.state_dict()) == list(inner.state_dict())
    assert [key for key, _ in outer.named_modules()] == [key for key, _ in inner.named_modules()]
    assert len(wrapped) == 3 and wrapped[0] is plain[0]
    inner.load_state_dict(outer.state_dict())
    outer.load_state_dict(copy.deepcopy(inner).state_dict())


def test_mode_dtype_and_attributes_are_shared_and_copies_are_independent(pair: Pair) -> None:
    plain, wrapped = pair
    wrapped.eval().double()
    plain.answer = 42
    assert not plain.training and plain[0].weight.dtype == torch.float64 and wrapped.answer == 42
    for twin in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert type(twin) is type(wrapped) and twin.answer == 42
        assert_parity(twin.state_dict(), plain.state_dict(), what="a copy")
        twin[0].weight.data.zero_()
        assert plain[0].weight.any()
        assert twin(torch.ones(2, 4, dtype=torch.float64)).requires_grad


def test_hooks_of_the_module_run_once(pair: Pair) -> None:
    plain, wrapped = pair
    calls: list[str] = []
    plain.register_forward_pre_hook(lambda *_: calls.append("before"))
    wrapped.register_forward_hook(lambda *_: calls.append("after"))
    wrapped(torch.ones(2, 4)).sum().backward()
    assert calls == ["before", "after"]


def test_apply_wraps_a_module_once_wherever_it_is() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict(
        {"first": shared, "second": shared, "list": nn.ModuleList([nn.Sequential(shared, nn.Tanh())])}
    )
    keys = list(model.state_dict())
    assert apply_activation_checkpointing(model, lambda module: isinstance(module, nn.Linear)) == 1
    assert model["first"] is model["second"] is model["list"][0][0]
    assert isinstance(model["first"], Checkpointed) and list(model.state_dict()) == keys
    with pytest.raises(UnsupportedError, match="wrap it once"):
        apply_activation_checkpointing(model)
    with pytest.raises(ConfigurationError, match="the wrapper is given by name, checkpoint_wrapper_fn"):
        apply_activation_checkpointing(nn.Sequential(nn.ReLU()), checkpoint_wrapper)  # type: ignore[arg-type]


def _patched() -> nn.Module:
    patched = nn.ReLU()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    return patched


def _compiled() -> nn.Module:
    compiled = nn.ReLU()
    compiled.compile(backend="eager")
    return compiled


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no module": (lambda: torch.relu, ConfigurationError, "is not an nn.Module"),
    "no forward": (nn.ModuleList, UnsupportedError, "ModuleList has no forward; wrap the modules in it"),
    "its own forward": (_patched, UnsupportedError, "ReLU has a forward on the instance"),
    "lazy": (lambda: nn.LazyLinear(2), UnsupportedError, "LazyLinear has parameters without a shape; call it once"),
    "compiled": (_compiled, UnsupportedError, "wrap the module first and compile it then"),
    "compiled outside": (lambda: torch.compile(nn.ReLU(), backend="eager"), UnsupportedError, "has been compiled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_would_bypass_the_wrapper_are_refused(case: str) -> None:
    make, error, match = REFUSED[case]
    for wrapper in (checkpoint_wrapper, offload_wrapper):
        with pytest.raises(error, match=match):
            wrapper(make())  # type: ignore[type-var]


def test_a_model_with_ddp_in_it_is_refused() -> None:
    def refused(rank: int, world_size: int) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(UnsupportedError, match=r"DistributedDataParallel in it.*DDP last"):
            offload_wrapper(nn.Sequential(ddp))

    run_ranks(refused, 1)


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigurationError, match="offload_to_cpu is True or False, got 'yes'"):
        checkpoint_wrapper(nn.ReLU(), offload_to_cpu="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no option 'use_reentrant': give one of context_fn, debug"):
        checkpoint_wrapper(nn.ReLU(), use_reentrant=True)
