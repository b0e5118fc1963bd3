"""Activations computed again in backward (Chen et al., 2016) instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overlap._checks import check_flag, is_one_of, told
from overlap.activations.offload import offloading
from overlap.activations.recompute import run_again
from overlap.activations.shared_module import SharedModule, shared_module
from overlap.errors import ConfigurationError

__all__ = ["Checkpointed", "checkpoint_wrapper"]

_Module = TypeVar("_Module", bound=nn.Module)
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, kw_only=True)
class _Options:
    offload_to_cpu: bool
    preserve_rng_state: bool
    determinism_check: str
    context_fn: ContextFn | None


class Checkpointed(SharedModule):
    """The class of what :func:`checkpoint_wrapper` returns, besides the module's own class.

    >>> wrapped = checkpoint_wrapper(model)
    >>> isinstance(wrapped, Checkpointed), isinstance(wrapped, torch.nn.Sequential)
    (True, True)
    """

    options_name = "_checkpoint_options"
    untraced = ("_save_offloaded",)
    _checkpoint_options: _Options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, of which only the arguments are kept for backward."""
        options = self._checkpoint_options
        plain: Callable[..., Any] = super().forward  # type: ignore[misc]
        names, positional = tuple(kwargs), len(args)

        def run(*values: Any) -> Any:
            return plain(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        extra: dict[str, Any] = {} if options.context_fn is None else {"context_fn": options.context_fn}
        save = self._save_offloaded if options.offload_to_cpu else checkpoint
        # By position, since what goes by name could be an option of checkpoint's own. A compiled module needs no care:
        # what its forward changes is not part of what is computed again.
        return save(
            run if torch.compiler.is_compiling() else run_again(run, self),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            determinism_check=options.determinism_check,
            **extra,
        )

    def _save_offloaded(self, run: Callable[..., Any], *values: Any, **options: Any) -> Any:
        with offloading(self, values):
            return checkpoint(run, *values, **options)


def checkpoint_wrapper(
    module: _Module,
    offload_to_cpu: bool = False,
    *,
    preserve_rng_state: bool = True,
    determinism_check: Literal["default", "none"] = "default",
    context_fn: ContextFn | None = None,
    checkpoint_impl: object = None,
) -> _Module:
    """``module`` with its activations computed again in backward, by ``torch.utils.checkpoint`` without reentrance.

    What is returned shares everything with ``module``, is an instance of its class, and has the same names of
    parameters, ``state_dict``, children and attributes; it pickles and copies as itself. ``module`` stays as it is.
    Forward hooks of the module run once. Gradients are equal in every bit where its kernels are deterministic.

    Args:
        module: takes and returns anything; wrapped before DDP and before ``torch.compile``.
        offload_to_cpu: whether the tensors among the arguments, which are all that is kept, are kept on the CPU.
        preserve_rng_state: whether random numbers (dropout) are drawn alike when it runs again.
        determinism_check: ``"default"`` to compare shapes and dtypes of what is computed again, ``"none"`` not to.
        context_fn: as that of ``torch.utils.checkpoint.checkpoint``, for selective checkpointing.
        checkpoint_impl: accepted for compatibility; PyTorch's ``CheckpointImpl.NO_REENTRANT``, or ``None``.

    Raises:
        ConfigurationError: ``module`` is not a module with a ``forward``, is wrapped already, or an option is bad.
        UnsupportedError: ``module`` has been compiled or scripted, has DDP in it, or is lazy and was never called.

    >>> layer = checkpoint_wrapper(torch.nn.Linear(2, 2))
    >>> isinstance(layer, torch.nn.Linear), [name for name, _ in layer.named_parameters()]
    (True, ['weight', 'bias'])
    """
    if not is_one_of(determinism_check, "default", "none"):
        raise ConfigurationError(f"determinism_check is {told(determinism_check)}: give 'default' or 'none'")
    if not isinstance(offload_to_cpu, bool):
        raise ConfigurationError(
            f"offload_to_cpu is {told(offload_to_cpu)}: give True or False; checkpoints here are never reentrant, "
            "so checkpoint_impl is not needed"
        )
    check_flag("preserve_rng_state", preserve_rng_state)
    if context_fn is not None and not callable(context_fn):
        raise ConfigurationError(
            f"context_fn is {told(context_fn)}: give a function as torch.utils.checkpoint.checkpoint takes it, or None"
        )
    if checkpoint_impl is not None and getattr(checkpoint_impl, "name", None) != "NO_REENTRANT":
        raise ConfigurationError(
            f"checkpoint_impl is {told(checkpoint_impl)}: checkpoints here are never reentrant; leave it out"
        )
    options = _Options(
        offload_to_cpu=offload_to_cpu,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        context_fn=context_fn,
    )
    return shared_module(module, Checkpointed, options)
