"""What an observer, such as the timeline, is told."""

from __future__ import annotations

from typing import Protocol

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation

__all__ = ["Observer", "Subject"]


class Subject(Protocol):
    """What a task works on: a bucket of a backward pass, or an item of background work."""

    @property
    def index(self) -> int: ...

    @property
    def step(self) -> int: ...

    def describe(self) -> str: ...


class Observer(Protocol):
    """Is told what happens, when it happens: on the thread where it happens and, on accelerators, with its stream
    current. ``label`` is the stage's ``repr``."""

    def arrived(self, bucket: Bucket) -> None:
        """DDP passed a bucket: all its gradients are computed."""
        ...

    def running(self, subject: Subject, label: str) -> None:
        """Code of a stage is about to run, up to the stage's next operation."""
        ...

    def ran(self, subject: Subject, label: str) -> None:
        """The code has run."""
        ...

    def launched(self, subject: Subject, label: str, operation: Operation) -> None:
        """An operation of a stage was started, or was already under way."""
        ...

    def waiting(self, subject: Subject, operation: Operation) -> None:
        """The wait for an operation is about to begin."""
        ...

    def finished(self, subject: Subject, operation: Operation) -> None:
        """The wait is over, and the operation did not fail."""
        ...
