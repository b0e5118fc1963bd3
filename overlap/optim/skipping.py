"""Backwards that are not the optimizer's own, such as a generator's loss through the discriminator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SkippedUpdates"]


class SkippedUpdates:
    """The blocks of ``with optimizer.skip_update():`` that the loop is in; they can be nested."""

    def __init__(self) -> None:
        self._depth = 0

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Let the backwards that begin inside make no update."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0
