"""Public names that are imported when they are first used.

To import all of the library takes a second or two, most of it in packages of PyTorch's that ``import torch`` leaves
out (``torch._dynamo``, ``torch.distributed.optim``). A package that lists its names here costs next to nothing until
one of them is asked for; everything else is as with names that were imported at once (PEP 562).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, parts: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        parts: for each module in it, by its name there, the names that the package has from it. The modules themselves
            are attributes of the package, too.
    """
    home = {name: part for part, names in parts.items() for name in names}

    def get(name: str) -> Any:
        if name in parts:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home, *parts})

    return get, names
