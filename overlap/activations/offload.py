"""Activations kept on the CPU until backward needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from overlap._checks import check_whole_number, refuse_capture, told
from overlap.activations.shared_module import SharedModule, shared_module
from overlap.activations.store import Stored, store_of, stores
from overlap.errors import ConfigurationError

__all__ = [
    "Offloaded",
    "limit_offload_in_flight",
    "limit_offload_pool",
    "offload_wrapper",
    "offloaded_bytes",
    "offloading",
    "release_offload_pool",
]

_LEAST_BYTES = 1024
_Module = TypeVar("_Module", bound=nn.Module)


class Offloaded(SharedModule):
    """The class of what :func:`offload_wrapper` returns, besides the module's own class.

    >>> wrapped = offload_wrapper(model)
    >>> isinstance(wrapped, Offloaded), isinstance(wrapped, torch.nn.Sequential)
    (True, True)
    """

    options_name = "_offload_min_bytes"
    untraced = ("forward",)
    _offload_min_bytes: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with what autograd saves for backward moved to the CPU."""
        plain: Callable[..., Any] = super().forward  # type: ignore[misc]
        with offloading(self, (*args, *kwargs.values()), min_bytes=self._offload_min_bytes):
            return plain(*args, **kwargs)


def offload_wrapper(module: _Module, *, min_bytes: int = _LEAST_BYTES) -> _Module:
    """``module`` with the tensors that autograd saves for backward kept on the CPU.

    Parameters and buffers of the module, which stay in memory anyway, are never moved, nor are parameters among its
    arguments. On CUDA copies go through a pool of pinned buffers and on a stream of their own, so that they overlap
    with computation, and what backward needs next is fetched ahead. On the CPU tensors are copied to other memory and
    back, which saves nothing and shows that it works. What is returned is as transparent as what
    :func:`checkpoint_wrapper` returns.

    As with all hooks on saved tensors, autograd does not see that a saved tensor is changed in place before backward:
    gradients are then those of the values that were saved. On an accelerator a change while the tensor is on its way
    to the CPU makes backward raise a :class:`TrainingLoopError`.

    Args:
        module: takes and returns anything; wrapped before DDP. Under ``torch.compile`` it runs as it is, uncompiled.
        min_bytes: smaller tensors stay where they are.

    Raises:
        ConfigurationError: ``module`` is not a module with a ``forward``, is wrapped already, or ``min_bytes`` is bad.
        UnsupportedError: ``module`` has been compiled or scripted, has DDP in it, or is lazy and was never called.

    >>> isinstance(offload_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear)
    True
    """
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise ConfigurationError(f"min_bytes is {told(min_bytes)}: give a number of bytes, such as {_LEAST_BYTES}")
    return shared_module(module, Offloaded, min_bytes)


def offloaded_bytes(device: torch.device | str | None = None) -> int:
    """Bytes of activations of ``device`` (the current accelerator's, or the CPU's) that are kept on the CPU now.

    >>> offloaded_bytes()
    0
    """
    return store_of(_device(device)).lent_bytes


def release_offload_pool() -> int:
    """Give back the CPU's memory that was used for activations and is kept for the next step; returns its bytes.

    What holds activations now is not touched. The next step takes memory anew.

    >>> freed = release_offload_pool()
    """
    return sum(store.release() for store in stores())


def limit_offload_pool(nbytes: int, device: torch.device | str | None = None) -> None:
    """Keep at most ``nbytes`` of the CPU's memory between steps for activations of ``device``; 0 keeps nothing.

    Without a call it is 64 MB for activations of the CPU, and for those of a GPU what the steps before needed at most.

    Args:
        nbytes: in memory that holds no activations now; pinned for those of a GPU.
        device: the current accelerator, or the CPU without one, where ``None``.

    Raises:
        ConfigurationError: ``nbytes`` is not a whole number of at least 0.

    >>> limit_offload_pool(64 * 2**20, "cpu")
    """
    store_of(_device(device)).limit(check_whole_number("nbytes", nbytes, least=0))


def limit_offload_in_flight(nbytes: int, device: torch.device | str | None = None) -> None:
    """Hold at most ``nbytes`` of the memory of ``device`` for copies to the CPU, and as much for what is fetched ahead.

    When more would be on its way to the CPU, the device's computation waits for the oldest copies; the host does not.
    One tensor may be on its way in each direction, however large it is. Without a call it is 256 MB. It changes nothing
    for activations of the CPU, which are copied at once.

    Args:
        nbytes: a larger number lets forward run further ahead of the copies; 0 lets one tensor be on its way.
        device: the current accelerator, or the CPU without one, where ``None``.

    Raises:
        ConfigurationError: ``nbytes`` is not a whole number of at least 0.

    >>> limit_offload_in_flight(256 * 2**20)
    """
    store_of(_device(device)).in_flight_bytes = check_whole_number("nbytes", nbytes, least=0)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def offloading(module: Any, values: Iterable[Any], *, min_bytes: int = _LEAST_BYTES) -> AbstractContextManager[Any]:
    """Keeps on the CPU what autograd saves inside, but for parameters of ``module`` and among ``values``."""
    if not torch.is_grad_enabled():
        return nullcontext()
    given = (value for value in values if isinstance(value, nn.Parameter))
    # Hooks are handed detached aliases, so parameters are recognized by their memory.
    resident = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers(), *given)}

    def pack(tensor: Tensor) -> Tensor | Stored:
        # The layout first: a sparse tensor has no number of bytes.
        if not _is_plain(tensor) or tensor.nbytes < max(min_bytes, 1):
            return tensor
        if tensor.untyped_storage().data_ptr() in resident:
            return tensor
        refuse_capture("offload_wrapper", "capture the module without it", tensor.device)
        return store_of(tensor.device).put(tensor)

    def unpack(packed: Tensor | Stored) -> Tensor:
        return packed.fetch() if isinstance(packed, Stored) else packed

    return saved_tensors_hooks(pack, unpack)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy of the elements makes up the tensor, and takes no more memory than it does (an expanded one)."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )
