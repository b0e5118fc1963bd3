"""PyTorch's classes under whose names this library has its own.

Training frameworks ask ``isinstance(x, PyTorch's class)``. So ours are subclasses of these, or registered with them
where they are abstract base classes. A subclass runs no ``__init__`` of PyTorch's and defines all that is public.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.optim import Optimizer

__all__ = [
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "ZeroRedundancyOptimizer",
]


class _InDict:
    """Takes the place of a slot: instances keep the attribute in their ``__dict__``, and lack it until it is set."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")


def _without_slots(cls: type) -> type:
    """A subclass of ``cls`` that stores nothing in its slots."""
    return type(cls.__name__, (cls,), {name: _InDict(name) for name in cls.__slots__})  # type: ignore[attr-defined]


if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # Their subclasses define all that is public in them.
    class PostLocalSGDOptimizer(Optimizer): ...

    class PostLocalSGDState: ...

    class PowerSGDState: ...

else:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook

    PostLocalSGDState = _without_slots(post_localSGD_hook.PostLocalSGDState)
    PowerSGDState = _without_slots(powerSGD_hook.PowerSGDState)

    def __getattr__(name: str) -> Any:
        """The optimizers: their package imports FSDP and scripts functional optimizers, which takes a second."""
        if name not in ("PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with warnings.catch_warnings():
            # PyTorch itself deprecates to script.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed import optim
        return getattr(optim, name)
