"""Modules that keep less between forward and backward: activations computed again, or kept on the CPU.

[Note: a shared module]

A wrapped module is an object of a subclass of the module's class that shares the module's ``__dict__``, and so its
parameters, buffers, hooks, children and mode; only ``forward`` differs. A module around the module would be noticed:
names of parameters would grow a prefix, ``isinstance`` would fail. See design/shared-module.md.

[Note: a forward that runs twice]

Backward runs a checkpointed forward again. It must find what the first run found: spectral normalization improves its
vectors in each forward. And it must leave no trace, or BatchNorm counts each batch twice. The state of the modules is
recorded before the first run and restored for every later one: parameters (``torch.func.functional_call`` exchanges
them during a forward), copies of buffers, and numbers, flags and strings among the attributes. Later runs change copies
of the buffers, so that the buffers and their version counters stay as they are; every attribute is restored afterwards.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from overlap._checks import check_flag, refuse_capture, told
from overlap._torch.autograd import version
from overlap.errors import ConfigurationError, UnsupportedError

__all__ = ["Checkpointed", "Offloaded", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"]

_Module = TypeVar("_Module", bound=nn.Module)

_SMALL_BYTES = 2**20
# A smaller tensor stays on its device: the copy would cost more than it saves.
_LEAST_OFFLOADED_BYTES = 1024
_CHECKPOINT_OPTIONS = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")
_NOT_TRACED = "what overlap offloads to the CPU goes through hooks on saved tensors, which are not traced"


class _SharedModule:
    """Base of the classes of wrapped modules, ahead of the module's own class. See [Note: a shared module]."""

    _plain_class: ClassVar[type[nn.Module]]
    _layers: ClassVar[tuple[tuple[type[_SharedModule], Any], ...]] = ()
    """Wrappers and their options, the innermost first."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time and cannot be imported by name: it is made again when this is loaded.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        plain = tuple(self._plain_class if arg is type(self) else arg for arg in args)
        return _restore, (self._layers, make, plain), *state


class Checkpointed(_SharedModule):
    """Base class of modules that :func:`checkpoint_wrapper` returns.

    >>> isinstance(checkpoint_wrapper(model), Checkpointed)
    True
    """

    _checkpointed: ClassVar[tuple[tuple[str, Any], ...]]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, of which only the arguments are kept for backward."""
        plain: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        names, positional = tuple(kwargs), len(args)

        def run(*values: Any) -> Any:
            return plain(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        # By position, since a keyword could be an option of checkpoint's own. Compiled code leaves no trace by itself.
        again = run if torch.compiler.is_compiling() else _Rerun(run, self)
        return checkpoint(again, *args, *kwargs.values(), use_reentrant=False, **dict(self._checkpointed))


class Offloaded(_SharedModule):
    """Base class of modules that :func:`offload_wrapper` returns.

    >>> isinstance(offload_wrapper(model), Offloaded)
    True
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; tensors that autograd saves for backward are moved to the CPU."""
        plain: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, nn.Parameter))
        # Hooks are given detached aliases, so parameters are recognized by their memory.
        resident = {one.untyped_storage().data_ptr() for one in (*self.parameters(), *self.buffers(), *given)}

        def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
            if not _is_dense(tensor) or tensor.untyped_storage().data_ptr() in resident:
                return tensor
            refuse_capture("offload_wrapper", "capture the module without it", tensor.device)
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            return tensor.device, host.copy_(tensor)

        def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, host = packed
            return host.to(device, non_blocking=True)

        with saved_tensors_hooks(pack, unpack):
            return plain(*args, **kwargs)


def checkpoint_wrapper(
    module: _Module, checkpoint_impl: object = None, *, offload_to_cpu: bool = False, **checkpoint_options: Any
) -> _Module:
    """``module`` with its activations recomputed in backward, by non-reentrant ``torch.utils.checkpoint``.

    The returned module shares everything with ``module``, is an instance of its class, and pickles and copies as
    itself. ``module`` stays as it is. Gradients are equal in every bit where its kernels are deterministic. From Chen
    et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    Args:
        module: takes and returns anything; wrapped before DDP and before ``torch.compile``.
        checkpoint_impl: accepted for compatibility; PyTorch's ``CheckpointImpl.NO_REENTRANT``, or ``None``.
        offload_to_cpu: whether the tensors among the arguments are kept on the CPU, by :func:`offload_wrapper`.
        checkpoint_options: ``preserve_rng_state``, ``determinism_check``, ``context_fn``, ``debug`` and ``early_stop``
            of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        ConfigurationError: ``module`` is not a module, or an option is bad.
        UnsupportedError: ``module`` has no ``forward`` of its class, is wrapped already, has been compiled or scripted,
            has DDP in it, or is lazy and was never called.

    >>> isinstance(checkpoint_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear)
    True
    """
    if checkpoint_impl is not None and getattr(checkpoint_impl, "name", None) != "NO_REENTRANT":
        raise ConfigurationError(
            f"checkpoint_impl is {told(checkpoint_impl)}: checkpoints here are never reentrant; leave it out"
        )
    if unknown := checkpoint_options.keys() - set(_CHECKPOINT_OPTIONS):
        raise ConfigurationError(
            f"checkpoint_wrapper has no option {min(unknown)!r}: give one of {', '.join(_CHECKPOINT_OPTIONS)}"
        )
    check_flag("offload_to_cpu", offload_to_cpu)
    wrapped = _shared_module(module, Checkpointed, tuple(sorted(checkpoint_options.items())))
    return offload_wrapper(wrapped) if offload_to_cpu else wrapped


def offload_wrapper(module: _Module) -> _Module:
    """``module`` with the tensors that autograd saves for backward kept on the CPU, as by
    ``torch.autograd.graph.save_on_cpu(pin_memory=True)``, except for parameters, buffers and tensors below 1 KiB.

    The host waits for each copy to the CPU; a copy back does not wait. On the CPU it saves nothing. A saved tensor must
    not be changed in place before backward: autograd does not see it, and uses the values that were saved. The returned
    module shares everything with ``module``, as that of :func:`checkpoint_wrapper` does.

    Args:
        module: takes and returns anything; wrapped before DDP. Under ``torch.compile`` it runs as it is, uncompiled.

    Raises:
        ConfigurationError, UnsupportedError: as :func:`checkpoint_wrapper`.

    >>> isinstance(offload_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear)
    True
    """
    return _shared_module(module, Offloaded, ())


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy of the elements makes up the tensor, and takes no more memory than it does (an expanded one)."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and _LEAST_OFFLOADED_BYTES <= tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def apply_activation_checkpointing(
    model: nn.Module,
    check_fn: Callable[[nn.Module], bool] = lambda module: True,
    *,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
) -> int:
    """Replace modules of ``model`` in place by ``checkpoint_wrapper_fn(module)``; returns how many.

    Args:
        model: ``model`` itself is not wrapped.
        check_fn: whether to wrap a module; called once for each module in the model that has a forward.
        checkpoint_wrapper_fn: :func:`checkpoint_wrapper`, :func:`offload_wrapper`, or a partial of one.

    Raises:
        ConfigurationError: ``check_fn`` does not return a ``bool``, or a module cannot be wrapped.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> apply_activation_checkpointing(model, lambda module: isinstance(module, torch.nn.Linear))
    2
    """
    if isinstance(check_fn, type | tuple) or not callable(check_fn):
        raise ConfigurationError(
            f"check_fn is a function of a module, got {check_fn!r}: for classes give "
            "lambda module: isinstance(module, classes)"
        )
    wrapped: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if module is model or not _has_forward(module):
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


def _shared_module(module: _Module, kind: Any, options: Any) -> _Module:
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{told(module)} is not an nn.Module; only modules can be wrapped")
    is_compiled = module.__dict__.get("_compiled_call_impl") is not None or hasattr(module, "_orig_mod")
    is_lazy = isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
    has_ddp = any(isinstance(part, DistributedDataParallel) for part in module.modules())
    unsupported = {
        "has been compiled; wrap the module first and compile it then": is_compiled,
        "has parameters without a shape; call it once and wrap it then": is_lazy,
        "has DistributedDataParallel in it; wrap parts of the model first, DDP last": has_ddp,
        "is scripted; wrap the module that it was made from": isinstance(module, torch.jit.ScriptModule),
        "has been wrapped before; wrap it once": isinstance(module, kind),
        "has no forward; wrap the modules in it": not _has_forward(module),
        "has a forward on the instance, which would be called in place of the wrapper's; override it in a subclass": (
            "forward" in module.__dict__
        ),
    }
    for reason in (words for words, is_so in unsupported.items() if is_so):
        raise UnsupportedError(f"{type(module).__name__} {reason}")
    return _share(module, kind, options)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _share(module: _Module, kind: Any, options: Any) -> _Module:
    # Any: to type checkers a class of modules has no hash.
    base: Any = type(module)
    shared: _Module = object.__new__(_shared_class(base, kind, options))
    object.__setattr__(shared, "__dict__", module.__dict__)
    return shared


@functools.cache
def _shared_class(base: Any, kind: Any, options: Any) -> Any:
    """One class for all modules of a class, so that code compiled for one serves the others."""
    contents = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        f"_{kind.__name__.lower()}": options,
        "_plain_class": getattr(base, "_plain_class", base),
        "_layers": (*getattr(base, "_layers", ()), (kind, options)),
    }
    if kind is Offloaded:
        # Here and not on ``kind``: that would import the compiler with this module.
        contents["forward"] = torch.compiler.disable(kind.forward, reason=_NOT_TRACED)
    name = f"{kind.__name__}{base.__name__}"
    return types.new_class(name, (kind, base), exec_body=lambda namespace: namespace.update(contents))


def _restore(
    layers: tuple[tuple[type[_SharedModule], Any], ...], make: Callable[..., nn.Module], args: Any
) -> nn.Module:
    module = make(*args)
    for kind, options in layers:
        module = _share(module, kind, options)
    return module


class _Rerun:
    """``run``, whose later calls find ``module`` as the first one found it. See [Note: a forward that runs twice]."""

    def __init__(self, run: Callable[..., Any], module: nn.Module) -> None:
        self._run = run
        self._is_first = True
        self._found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._copies: dict[Tensor, Tensor] = {}
        # By their dicts, which a module and its wrapper share.
        for part in {id(vars(part)): part for part in module.modules()}.values():
            kinds: tuple[type, ...] = (bool, int, float, str, type(None))
            if part is module and part._forward_pre_hooks:
                kinds = (*kinds, Tensor)  # Set by its pre-hooks, such as a normalized weight; they do not run again.
            kept = {name: value for name, value in vars(part).items() if isinstance(value, kinds)}
            self._found += [(vars(part), kept), *((of, dict(of)) for of in (part._parameters, part._buffers))]
            buffers = [buffer for buffer in part._buffers.values() if buffer is not None and not buffer.requires_grad]
            self._copies.update({buffer: buffer.clone() for buffer in buffers})

    def __call__(self, *values: Any) -> Any:
        if not self._is_first:
            with self._restored():
                return self._run(*values)
        self._is_first = False
        versions = {buffer: version(buffer) for buffer in self._copies}
        result = self._run(*values)
        for buffer, before in versions.items():
            # Small ones may have been changed through ``.data``, which raises no version counter.
            if buffer.nbytes > _SMALL_BYTES and version(buffer) == before:
                self._copies[buffer] = buffer
        return result

    @contextmanager
    def _restored(self) -> Iterator[None]:
        before = [(values, dict(values)) for values, _ in self._found]
        # Copies of the copies, since backward may run the forward any number of times.
        fresh = {id(buffer): copy.clone() for buffer, copy in self._copies.items()}
        try:
            for values, found in self._found:
                values.update({name: fresh.get(id(value), value) for name, value in found.items()})
            yield
        finally:
            for values, old in before:
                values.clear()
                values.update(old)
