"""What the commands share: option types that say what is allowed, and a check for extras."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec

from overlap.errors import ConfigurationError

__all__ = ["MissingExtraError", "require_extra", "whole_number"]


class MissingExtraError(ConfigurationError):
    """A command needs packages that are not installed."""


def require_extra(extra: str, *modules: str) -> None:
    """Checks that the modules can be imported, without importing them.

    Raises:
        MissingExtraError: naming what is missing and the pip extra that brings it.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"{', '.join(missing)} not installed: pip install 'ddp-overlap[{extra}]'")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return parse
