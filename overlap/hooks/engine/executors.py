"""What a stage's code runs in, and what it means there to wait for a collective."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overlap._torch.device import has_streams
from overlap.errors import CollectiveError, PeerError
from overlap.hooks.engine.channels import GroupChannels, PrivateChannels
from overlap.hooks.engine.task import Observer

__all__ = ["BACKGROUND_LANES", "HostExecutor", "StreamExecutor", "executor_for"]

BACKGROUND_LANES = 2
"""Of two, one packs or unpacks while the other is on its way; more would only take more memory."""

# How long a thread waits for a collective before it looks whether another rank has reported a failure.
_PATIENCE = timedelta(seconds=1)


class HostExecutor:
    """CPU tensors: to wait is to block the thread, with an eye on the other ranks."""

    def __init__(self, channels: GroupChannels | PrivateChannels) -> None:
        self.channels = channels
        self.observer: Observer | None = None

    def begin(self, lane: int) -> None:
        """Nothing to order: what was called before is done."""

    def begin_background(self) -> None:
        """As :meth:`begin`."""

    def scope(self, lane: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, work: dist.Work) -> None:
        failures = self.channels.failures
        if failures is None:
            work.wait()
            return
        start_s = time.monotonic()
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError as error:
                failure = failures.read()
                if failure is not None:
                    raise PeerError(f"another rank of the group failed first: {failure}") from error
                if work.is_completed():
                    waited_s = time.monotonic() - start_s
                    raise CollectiveError(
                        f"a collective failed after {waited_s:.1f} s and no rank reported an error of its own; "
                        f"a rank's process has ended, or hangs: {error}"
                    ) from error

    def wait_for_pass(self) -> None:
        """Code runs in the order in which it is called: what every bucket did so far is done."""


class StreamExecutor:
    """Accelerator tensors: a side stream a bucket; to wait is to make that stream wait, never the host.

    Collectives are launched and waited for with the bucket's stream current, so the process group's own stream and
    ours order each other by events. What a stage allocates belongs to its stream, and the works keep what they move
    alive until they are waited for; bucket buffers and parameters outlive the pass.
    """

    def __init__(self, channels: GroupChannels, device: torch.device) -> None:
        self.channels = channels
        self.observer: Observer | None = None
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._streams: list[Any] = []

    def begin(self, lane: int) -> None:
        """Let the lane's stream start behind what the current stream (autograd's) has queued: the gradients."""
        while len(self._streams) <= lane:
            self._streams.append(self._module.Stream(device=self._device))
        self._streams[lane].wait_stream(self._module.current_stream(self._device))

    def begin_background(self) -> None:
        """Let the streams of background work start behind what the current stream has queued."""
        for lane in range(BACKGROUND_LANES):
            self.begin(lane)

    def scope(self, lane: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._streams[lane])
        return context

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def wait_for_pass(self) -> None:
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)


def executor_for(group: dist.ProcessGroup, device: torch.device) -> HostExecutor | StreamExecutor:
    """Runs stages' code on the calling thread, on ``group`` itself."""
    channels = GroupChannels(group)
    return StreamExecutor(channels, device) if has_streams(device) else HostExecutor(channels)
