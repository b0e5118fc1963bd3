"""Streams that only note what they are told, to store tensors of the CPU as those of an accelerator are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import DeviceStreams


class FakeStream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self.streams, self.name = streams, name

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.calls.append(("wait stream", self.name, other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self.streams.calls.append(("wait", self.name, event.number))


class FakeEvent:
    def __init__(self, streams: FakeStreams) -> None:
        self.streams, self.number = streams, -1

    def record(self, stream: FakeStream) -> None:
        self.number = self.streams.recorded
        self.streams.recorded += 1


class FakeStreams(DeviceStreams):
    """One device, whose computation is on the stream "main"; other streams are named as they are made."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.recorded = 0
        self._current = [FakeStream(self, "main")]
        self._made = 0

    def has_streams(self, device: torch.device) -> bool:
        return True

    def new_stream(self, device: torch.device, *, priority: int = 0) -> FakeStream:
        self._made += 1
        return FakeStream(self, f"stream {self._made}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:  # type: ignore[override]
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def new_event(self, device: torch.device, *, is_timed: bool) -> FakeEvent:
        return FakeEvent(self)

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self.calls.append(("record", stream.name, tensor.data_ptr()))

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def called(self, kind: str) -> list[tuple[Any, ...]]:
        """The calls of one kind since the last time, without the kind."""
        found = [rest for name, *rest in self.calls if name == kind]
        self.calls.clear()
        return [tuple(rest) for rest in found]
