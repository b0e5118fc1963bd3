"""Waiting for work that rides outside of a backward pass."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["Gate"]


class Gate:
    """Opens when something that rides has come: :meth:`open` where it runs, :meth:`wait` where it is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_done = threading.Event()
        self._event: Any = None
        self._error: BaseException | None = None

    def open(self) -> None:
        """What was to come is there, or on an accelerator will be when the current stream has come this far."""
        if self._device.type != "cpu":
            self._event = torch.get_device_module(self._device).Event()
            self._event.record()
        self._is_done.set()

    def fail(self, error: BaseException) -> None:
        """It will not come; :meth:`wait` raises ``error``."""
        if not self._is_done.is_set():
            self._error = error
            self._is_done.set()

    def wait(self) -> None:
        """Block until it is open; on an accelerator the current stream waits, not the host."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
