"""Who reads a module's parameters.

Private: ``Module._parameters``, the dict in which ``module.weight``, ``parameters()``, ``state_dict()``, ``_apply`` and
copies look parameters up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["is_compiled", "is_compiled_in_place", "notify_of_reads", "stop_notifying", "unread_parameters"]

OnRead = Callable[[Iterable[Tensor | None]], None]


class _Parameters(dict[str, Any]):
    """The parameters of a module, which calls ``on_read`` with those that are about to be read."""

    __slots__ = ("on_read",)

    def __init__(self, parameters: dict[str, Any], on_read: OnRead) -> None:
        super().__init__(parameters)
        self.on_read = on_read

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.on_read((value,))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        self.on_read((super().get(name),))
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.on_read((super().get(name),))
        return super().pop(name, *default)

    def values(self) -> Any:
        self.on_read(super().values())
        return super().values()

    def items(self) -> Any:
        self.on_read(super().values())
        return super().items()

    def __iter__(self) -> Iterator[str]:
        # Since this is overridden dict(parameters) and {**parameters} call __getitem__.
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        self.on_read(super().values())
        return self.plain()

    def plain(self) -> dict[str, Any]:
        """An ordinary dict of the same parameters, without a read."""
        return dict(super().items())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def notify_of_reads(module: nn.Module, on_read: OnRead) -> None:
    """Call ``on_read`` before parameters of ``module`` are read.

    A scripted module keeps its parameters elsewhere, and is left alone.
    """
    parameters = vars(module).get("_parameters")
    if parameters is None or type(parameters) not in (dict, OrderedDict):
        return
    vars(module)["_parameters"] = _Parameters(parameters, on_read)


def stop_notifying(module: nn.Module, on_read: OnRead) -> None:
    """Undo :func:`notify_of_reads` with this ``on_read``."""
    parameters = vars(module).get("_parameters")
    if isinstance(parameters, _Parameters) and parameters.on_read == on_read:
        vars(module)["_parameters"] = parameters.plain()


def unread_parameters(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters by name, without a read."""
    parameters = module._parameters
    return parameters.plain() if isinstance(parameters, _Parameters) else dict(parameters.items())


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was made by ``torch.compile(...)``, or was compiled in place."""
    return hasattr(module, "_orig_mod") or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None
