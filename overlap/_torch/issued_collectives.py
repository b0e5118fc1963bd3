"""Sees the collectives that go through process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

# Private: the public counter of communication, `CommDebugMode`, counts calls and not bytes, and no messages.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["IssuedCollectives"]


class IssuedCollectives(TorchDispatchMode):
    """Within it, ``note(name, arguments, size)`` is called for each collective on a process group of PyTorch's.

    ``name`` is that of the operator in ``torch.ops.c10d``, ``arguments`` are its own, tensors first, and ``size`` is
    the number of ranks. Collectives of this thread and of backward are seen, DDP's included; those of other threads,
    and of groups written in Python, are not. Nothing else changes: collectives reach the process group that they were
    meant for, and messages that PyTorch starts together stay together.
    """

    def __init__(self, note: Callable[[str, Sequence[Any], int], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args, _ranks(args))
        return func(*args, **(kwargs or {}))


def _ranks(arguments: Sequence[Any]) -> int:
    """Operators get their process group in a box, after their tensors."""
    for argument in arguments:
        if type(argument).__name__ == "ScriptObject" and argument._type().qualified_name().endswith("ProcessGroup"):
            return int(dist.ProcessGroup.unbox(argument).size())
    return 1
