"""[Note: a forward that runs twice]

Backward runs a checkpointed forward again. It must then find what the first run found, or it computes something else:
spectral normalization improves its vectors in each forward. And it must leave no trace, or BatchNorm counts each batch
twice. Arguments are the same tensors; what else a forward may read and change is the state of its modules, which is
noted before the first run and put in place for every later one:

- parameters themselves, which ``torch.func.functional_call`` exchanges for the time of a forward;
- buffers, as copies: most are changed in place, some through ``.data``, which raises no version counter. Of a large
  buffer whose counter stood still, no copy is kept;
- numbers, flags and strings among the attributes of every module, such as its mode;
- tensors among the attributes of the wrapped module, which its pre-hooks may have set; those of the modules in it run
  again.

A later run changes copies of the buffers, so that the real ones and their version counters stay as they are. After it
every attribute is what it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from overlap._torch.autograd import version

__all__ = ["ModuleState", "run_again"]

_SMALL_BYTES = 2**20


def run_again(run: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """``run``, whose later calls find in ``module`` what the first one found, and leave nothing behind."""
    state: ModuleState | None = None

    def call(*values: Any) -> Any:
        nonlocal state
        if state is not None:
            with state.restored():
                return run(*values)
        state = ModuleState(module)
        result = run(*values)
        state.forget_unchanged()
        return result

    return call


class ModuleState:
    """The state of ``module`` and the modules in it, as it is now. See [Note: a forward that runs twice]."""

    def __init__(self, module: Any) -> None:
        # By their dicts, which a module and its wrapper share.
        parts = {id(vars(part)): part for part in module.modules()}.values()
        self._attributes = [_Attributes(part, with_tensors=part is module) for part in parts]
        self._buffers = [_Buffers(part._buffers) for part in parts]
        self._parameters = [(part._parameters, dict(part._parameters)) for part in parts]

    def forget_unchanged(self) -> None:
        """The forward is done: let go of copies of large buffers that it did not change."""
        for buffers in self._buffers:
            buffers.forget_unchanged()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs the block in this state, and undoes what it changes."""
        dicts: list[dict[str, Any]] = [*(one.of for one in self._attributes), *(one.of for one in self._buffers)]
        dicts.extend(parameters for parameters, _ in self._parameters)
        before = [(values, dict(values)) for values in dicts]
        copies: dict[int, Tensor] = {}
        try:
            for attributes in self._attributes:
                attributes.of.update(attributes.found)
            for buffers in self._buffers:
                buffers.put_copies(copies)
            for parameters, found in self._parameters:
                parameters.update(found)
            yield
        finally:
            for values, old in before:
                for name in values.keys() - old.keys():
                    del values[name]
                values.update(old)


class _Attributes:
    """The attributes of one module that can be kept without keeping what they refer to."""

    def __init__(self, module: nn.Module, *, with_tensors: bool) -> None:
        self.of: dict[str, Any] = vars(module)
        kinds: tuple[type, ...] = (bool, int, float, str, type(None))
        if with_tensors and module._forward_pre_hooks:
            kinds = (*kinds, Tensor)
        self.found = {name: value for name, value in self.of.items() if isinstance(value, kinds)}


class _Buffers:
    """The buffers of one module."""

    def __init__(self, of: dict[str, Tensor | None]) -> None:
        self.of = of
        self._found = dict(of)
        known = {name: tensor for name, tensor in of.items() if tensor is not None and not tensor.requires_grad}
        self._versions = {name: _version(tensor) for name, tensor in known.items()}
        self._copies = {name: tensor.clone() for name, tensor in known.items()}

    def forget_unchanged(self) -> None:
        for name, before in self._versions.items():
            tensor = self._found[name]
            if tensor is not None and tensor.nbytes > _SMALL_BYTES and _version(tensor) == before:
                del self._copies[name]

    def put_copies(self, copies: dict[int, Tensor]) -> None:
        """Put a copy in the place of each buffer, the same one wherever it is; ``copies`` holds those made before."""
        for name, tensor in self._found.items():
            if name in self._versions and tensor is not None:
                if id(tensor) not in copies:
                    # Of the copy, since backward may run the forward any number of times.
                    copies[id(tensor)] = self._copies.get(name, tensor).clone()
                self.of[name] = copies[id(tensor)]
            else:
                self.of[name] = tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)
