"""Wrapping many modules of a model at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from overlap._checks import described
from overlap.activations.checkpoint import checkpoint_wrapper
from overlap.activations.shared_module import has_forward
from overlap.errors import ConfigurationError

__all__ = ["apply_activation_checkpointing"]


def apply_activation_checkpointing(
    model: nn.Module,
    check_fn: Callable[[nn.Module], bool] = lambda module: True,
    *,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
) -> int:
    """Replace modules of ``model`` by what ``checkpoint_wrapper_fn`` returns for them.

    Args:
        model: changed in place; ``model`` itself is not wrapped.
        check_fn: returns for each module in the model whether to wrap it. Lists of modules have no forward and are not
            asked about. A module in several places is wrapped once.
        checkpoint_wrapper_fn: :func:`checkpoint_wrapper`, :func:`offload_wrapper`, or a partial of one.

    Returns:
        How many modules were wrapped.

    Raises:
        ConfigurationError: ``check_fn`` does not return a ``bool``, or a module cannot be wrapped.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> apply_activation_checkpointing(model, lambda module: isinstance(module, torch.nn.Linear))
    2
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is an nn.Module, whose modules are wrapped in place, got {described(model)}")
    if isinstance(check_fn, type | tuple) or not callable(check_fn):
        raise ConfigurationError(
            f"check_fn is a function of a module, got {check_fn!r}: for classes give "
            "lambda module: isinstance(module, classes)"
        )
    wrapped: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if module is model or not has_forward(module):
            continue
        chosen = check_fn(module)
        if not isinstance(chosen, bool):
            raise ConfigurationError(
                f"check_fn returned {type(chosen).__name__} for {type(module).__name__}: it returns True or False; "
                "the wrapper is given by name, checkpoint_wrapper_fn=..."
            )
        if chosen:
            wrapped[module] = checkpoint_wrapper_fn(module)
    # A module and its wrapper share their children, so the order does not matter.
    for parent in list(model.modules()):
        # Not named_children, which names a module once, whatever other names the parent has for it.
        for name, child in list(parent._modules.items()):
            if child in wrapped:
                parent.register_module(name, wrapped[child])
    return len(wrapped)
