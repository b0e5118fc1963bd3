"""What a stage's code runs in, and what it means there to wait for a collective."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overlap.errors import CollectiveError, PeerError
from overlap.hooks.bucket import Bucket
from overlap.hooks.channels import GroupChannels, PrivateChannels
from overlap.hooks.task import Observer

__all__ = ["HostExecutor", "StreamExecutor"]

# How long a thread waits for a collective before it looks whether another rank has reported a failure.
_PATIENCE = timedelta(seconds=1)


class HostExecutor:
    """CPU tensors: to wait is to block the thread, with an eye on the other ranks."""

    def __init__(self, channels: GroupChannels | PrivateChannels) -> None:
        self.channels = channels
        self.observer: Observer | None = None

    def scope(self, bucket: Bucket) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self, work: dist.Work) -> None:
        board = self.channels.board
        if board is None:
            work.wait()
            return
        start_s = time.monotonic()
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError as error:
                failure = board.read()
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

    def arrive(self, bucket: Bucket) -> None:
        """Let the bucket's stream start behind what the current stream (autograd's) has queued: the gradients."""
        while len(self._streams) <= bucket.index:
            self._streams.append(self._module.Stream(device=self._device))
        self._streams[bucket.index].wait_stream(self._module.current_stream(self._device))

    def scope(self, bucket: Bucket) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._streams[bucket.index])
        return context

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def wait_for_pass(self) -> None:
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
