"""A device that does all at once: the code for accelerators, its threads included, runs on tensors of the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import DeviceStreams


class _OneStream:
    """Stands for a stream on which all is done at once."""

    device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream


class _Event:
    def record(self, stream: Any = None) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded

    def query(self) -> bool:
        return True


class AtOnce(DeviceStreams):
    """A device whose only stream runs at once: threads are real, where the detector sees one alone."""

    stream = _OneStream()

    def has_streams(self, device: torch.device) -> bool:
        return True

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Any:
        return self.stream

    def current_stream(self, device: torch.device) -> Any:
        return self.stream

    default_stream = current_stream

    def on_stream(self, stream: Any) -> Any:
        return nullcontext()

    def new_event(self, device: torch.device, *, is_timed: bool) -> Any:
        return _Event()

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        pass

    def future_for(self, device: torch.device) -> Any:
        return torch.futures.Future()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.clone()

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def is_capturing(self, device: torch.device | None) -> bool:
        return False

    def synchronize(self, device: torch.device) -> None:
        pass
