"""[Note: a shared module]

A wrapper that nobody should notice cannot be a module around the module: names of parameters would grow a prefix,
``isinstance`` would fail, and every index and attribute would have to be passed on. A wrapped module is therefore a
shared module: an object of a subclass of the module's class that shares the module's ``__dict__``, and so its
parameters, buffers, hooks, children and mode, whichever of the two is changed. Only ``forward`` differs. The module
that was wrapped stays as it was.

Hooks of the module run around that ``forward``, once, and not again when activations are recomputed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import told
from overlap.errors import ConfigurationError, UnsupportedError

__all__ = ["SharedModule", "has_forward", "shared_module"]

_Module = TypeVar("_Module", bound=nn.Module)

_NOT_TRACED = "what overlap offloads to the CPU goes through hooks on saved tensors, which are not traced"


class SharedModule:
    """What the class of a shared module derives from, ahead of the module's own class; ``forward`` is overridden."""

    options_name: ClassVar[str]
    """The class attribute that holds the options; each wrapper has its own, since a module can be wrapped by both."""
    untraced: ClassVar[tuple[str, ...]]
    """Methods that ``torch.compile`` leaves alone."""
    _plain_class: ClassVar[type[nn.Module]]
    _layers: ClassVar[tuple[tuple[type[SharedModule], Any], ...]] = ()
    """Wrappers and their options, the innermost first."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time and cannot be imported by name: it is made again where this is loaded.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        plain = tuple(self._plain_class if arg is type(self) else arg for arg in args)
        return _restore, (self._layers, make, plain), *state


def shared_module(module: _Module, kind: type[SharedModule], options: Any) -> _Module:
    """``module`` with the ``forward`` of ``kind``. See [Note: a shared module].

    Raises:
        ConfigurationError: ``module`` is not a module, has no ``forward``, or has one of its own on the instance.
        UnsupportedError: it is compiled, scripted, lazy and not called yet, or has DDP in it.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{told(module)} is not an nn.Module; only modules can be wrapped")
    name = type(module).__name__
    if isinstance(module, kind):
        raise ConfigurationError(f"this {name} has been wrapped before; wrap it once")
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{name} is a scripted module; wrap the module that it was made from, and do not script it"
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise UnsupportedError(
            f"{name} has parameters without a shape, and becomes another class when it is first called; "
            f"call it once and wrap it then"
        )
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise UnsupportedError(f"{name} has DistributedDataParallel in it; wrap parts of the model first, DDP last")
    if module.__dict__.get("_compiled_call_impl") is not None or hasattr(module, "_orig_mod"):
        raise UnsupportedError(f"{name} has been compiled; wrap the module first and compile it then")
    if "forward" in module.__dict__:
        raise ConfigurationError(
            f"the forward of this {name} was replaced on the instance and would be called in place of the "
            f"wrapper's; wrap the module first, or override forward in a subclass"
        )
    if not has_forward(module):
        raise ConfigurationError(f"{name} has no forward; wrap the modules in it")
    return _share(module, kind, options)


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called; lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _share(module: _Module, kind: Any, options: Any) -> _Module:
    # Any: to type checkers a class of modules has no hash.
    base: Any = type(module)
    shared: _Module = object.__new__(_shared_class(base, kind, options))
    object.__setattr__(shared, "__dict__", module.__dict__)
    return shared


@functools.cache
def _shared_class(base: Any, kind: Any, options: Any) -> Any:
    """One class for all modules of a class, so that what is compiled for one serves the others."""
    is_shared = issubclass(base, SharedModule)
    contents = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        kind.options_name: options,
        "_plain_class": base._plain_class if is_shared else base,
        "_layers": (*(base._layers if is_shared else ()), (kind, options)),
    }
    # Here and not on ``kind``: that would import the compiler with this module.
    contents.update({name: torch.compiler.disable(getattr(kind, name), reason=_NOT_TRACED) for name in kind.untraced})
    name = f"{kind.__name__}{base.__name__}"
    return types.new_class(name, (kind, base), exec_body=lambda namespace: namespace.update(contents))


def _restore(
    layers: tuple[tuple[type[SharedModule], Any], ...], make: Callable[..., nn.Module], args: Any
) -> nn.Module:
    module = make(*args)
    for kind, options in layers:
        module = _share(module, kind, options)
    return module
