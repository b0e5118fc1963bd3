"""The one way to import torchvision, also beside a CPU-only torch.

PyPI's torchvision is built for CUDA: beside a CPU-only torch its compiled operators cannot be loaded, and the import
then fails because two of them are given Python implementations. Their names are all that is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["load_torchvision"]


@cache
def load_torchvision() -> ModuleType:
    """Imports torchvision and returns it. Operators that torch cannot load (`nms`) stay unusable.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    if not _operators_load():
        _declare_operators()
    return importlib.import_module("torchvision")


def _operators_load() -> bool:
    """Loads torchvision's compiled operators, which its own import would do as well."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # Not installed: the import that follows says so.
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True
    return True  # There is no library where one is expected: torchvision's own import decides.


def _declare_operators() -> None:
    definitions = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        definitions.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(definitions)


_kept: list[torch.library.Library] = []  # Operators are removed when their library is garbage-collected.
