"""`apply_activation_checkpointing` wraps the modules of a model that are chosen, in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from overlap import ConfigurationError
from overlap.activations import Checkpointed, apply_activation_checkpointing, checkpoint_wrapper


def _with_a_shared_layer() -> tuple[nn.ModuleDict, nn.Linear]:
    shared = nn.Linear(2, 2)
    return nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.ModuleList([shared])}), shared


def test_modules_in_several_places_are_wrapped_once() -> None:
    model, shared = _with_a_shared_layer()
    assert apply_activation_checkpointing(model) == 3
    assert model["a"][0] is model["b"][0] and isinstance(model["a"][0], Checkpointed)
    assert isinstance(model["a"], Checkpointed) and isinstance(model["a"][1], nn.ReLU)
    model["a"](torch.ones(1, 2)).sum().backward()
    assert shared.weight.grad is not None


def test_a_module_under_two_names_of_one_parent_stays_one_module() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": shared, "second": shared, "all": nn.Sequential(shared, nn.Tanh(), shared)})
    assert apply_activation_checkpointing(model, lambda module: isinstance(module, nn.Linear)) == 1
    places = [model["first"], model["second"], model["all"][0], model["all"][2]]
    assert all(place is places[0] for place in places) and isinstance(places[0], Checkpointed)
    assert len(list(model.modules())) == 4, "the model, the chain, and two layers"


def test_state_dict_keys_stay() -> None:
    model, _ = _with_a_shared_layer()
    apply_activation_checkpointing(model)
    assert list(model.state_dict()) == ["a.0.weight", "a.0.bias", "b.0.weight", "b.0.bias"]


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    model, _ = _with_a_shared_layer()
    apply_activation_checkpointing(model)
    with pytest.raises(ConfigurationError, match="wrap it once"):
        apply_activation_checkpointing(model)


def test_a_check_that_returns_a_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="check_fn returned CheckpointedLinear for Sequential"):
        apply_activation_checkpointing(
            nn.Sequential(nn.Sequential()), lambda module: checkpoint_wrapper(nn.Linear(1, 1))
        )


def test_a_wrapper_in_the_place_of_the_check_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the wrapper is given by name, checkpoint_wrapper_fn"):
        apply_activation_checkpointing(nn.Sequential(nn.ReLU()), checkpoint_wrapper)  # type: ignore[arg-type]
