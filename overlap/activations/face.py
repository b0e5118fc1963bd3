"""[Note: a second face]

What wraps a module so that nobody notices cannot be a module around it: names of parameters would grow a prefix,
``isinstance`` would fail, an index or an attribute would have to be passed on. Here it is a second face of the same
module: an object of a subclass that shares the module's ``__dict__``, so its parameters, buffers, hooks, children and
mode, whatever becomes of them. Only ``forward`` is another. The module itself stays what it was.

Hooks of the module run around that ``forward``, once, and not again when activations are recomputed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from overlap.errors import ConfigurationError, UnsupportedError

__all__ = ["Face", "face_of", "has_forward"]


class Face:
    """What a second face of a module derives from, ahead of the module's class; ``forward`` is its own."""

    options_name: ClassVar[str]
    """The class attribute that holds the options; each kind has its own, since a face can have a face."""
    _plain_class: ClassVar[type[nn.Module]]
    _layers: ClassVar[tuple[tuple[type[Face], Any], ...]] = ()
    """Kinds and options of all faces, that of the plain class first."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made as we go and has no name to be found by: it is made again where this is loaded.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        plain = tuple(self._plain_class if arg is type(self) else arg for arg in args)
        return _restore, (self._layers, make, plain), *state


def face_of(module: nn.Module, kind: type[Face], options: Any) -> nn.Module:
    """A second face of ``module`` with the ``forward`` of ``kind``. See [Note: a second face].

    Raises:
        ConfigurationError: ``module`` is no module, has no ``forward``, or one of its own on the instance.
        UnsupportedError: it is compiled, scripted, lazy and not called yet, or has DDP in it.
    """
    what = f"{kind.__name__.lower()} face"
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{module!r} is no nn.Module; only modules can have a {what}")
    name = type(module).__name__
    if isinstance(module, kind):
        raise ConfigurationError(f"this {name} has been wrapped before; wrap it once")
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{name} is a scripted module; wrap the module that it was made of, and do not script it"
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
    return _face(module, kind, options)


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called; lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _face(module: nn.Module, kind: Any, options: Any) -> nn.Module:
    # Any: to type checkers a class of modules has no hash.
    base: Any = type(module)
    face: nn.Module = object.__new__(_face_class(base, kind, options))
    object.__setattr__(face, "__dict__", module.__dict__)
    return face


@functools.cache
def _face_class(base: Any, kind: Any, options: Any) -> Any:
    """One class for all modules of a class, so that what is compiled for one serves the others."""
    is_face = issubclass(base, Face)
    contents = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        kind.options_name: options,
        "_plain_class": base._plain_class if is_face else base,
        "_layers": (*(base._layers if is_face else ()), (kind, options)),
    }
    name = f"{kind.__name__}{base.__name__}"
    return types.new_class(name, (kind, base), exec_body=lambda namespace: namespace.update(contents))


def _restore(layers: tuple[tuple[type[Face], Any], ...], make: Callable[..., nn.Module], args: Any) -> nn.Module:
    module = make(*args)
    for kind, options in layers:
        module = _face(module, kind, options)
    return module
