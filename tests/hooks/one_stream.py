"""Streams without concurrency."""

from typing import Any

import torch

from overlap._torch.device import DeviceStreams


class OneStream(DeviceStreams):
    """A device that runs everything in order, for tensors of the CPU: code for accelerators runs on them."""

    device = torch.device("cpu")

    def __init__(self, *, has_streams: bool = True) -> None:
        self._has_streams = has_streams

    def has_streams(self, device: torch.device) -> bool:
        return self._has_streams

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Any:
        return self

    def current_stream(self, device: torch.device) -> Any:
        return self

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.clone()

    def set_stream(self, stream: Any) -> None:
        pass

    def new_event(self, device: torch.device, *, is_timed: bool) -> Any:
        return self

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        pass

    def future_for(self, device: torch.device) -> Any:
        return torch.futures.Future()

    def synchronize(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True
