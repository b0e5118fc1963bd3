"""Reading what an accelerator computes without waiting for it."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from torch import Tensor

from overlap._torch.device import recorded_event, to_host

__all__ = ["LateReads"]

T = TypeVar("T")


class LateReads(Generic[T]):
    """Tensors on their way to the host, each with what it is about, in the order in which they were sent."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[T, Tensor, Any]] = deque()

    def send(self, about: T, values: Tensor) -> None:
        """Copy ``values``, on a device with streams, to the host, behind what the current stream has queued."""
        self._under_way.append((about, to_host(values), recorded_event(values.device)))

    def read(self, *, waits: bool = False) -> list[tuple[T, Tensor]]:
        """What has come by now, each once; with ``waits`` the host waits for all that was sent."""
        come = []
        while self._under_way:
            about, values, event = self._under_way[0]
            if waits:
                event.synchronize()
            elif not event.query():
                break
            self._under_way.popleft()
            come.append((about, values))
        return come
