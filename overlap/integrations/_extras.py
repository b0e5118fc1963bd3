"""The error where a framework is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wraps the imports of the package that ``extra`` of the distribution installs and is named after.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != extra:
            raise  # It is there, and something that it needs is not.
        raise ImportError(
            f"overlap.integrations.{extra} needs the package {extra}: pip install '.[{extra}]' in a clone of overlap",
            name=error.name,
        ) from error
