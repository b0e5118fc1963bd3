"""What ``torch.compile`` makes of a module."""

from __future__ import annotations

__all__ = ["plain_name", "uncompiled"]


def uncompiled(module: object) -> object:
    """What ``torch.compile`` was given to make ``module``, or ``module`` itself. Private: the names."""
    while type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
        module = module._orig_mod
    return module


def plain_name(name: str) -> str:
    """The name that a parameter or buffer has where no part of the model is compiled. Private: the prefix."""
    return name.replace("_orig_mod.", "")
