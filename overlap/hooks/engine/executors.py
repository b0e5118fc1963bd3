"""Where a stage's code runs, and what it means there to wait for a collective."""

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
from overlap.hooks.engine.observer import Observer

__all__ = ["BACKGROUND_LANES", "Executor", "HostExecutor", "executor_for"]

BACKGROUND_LANES = 2
"""While one packs or unpacks, the other communicates; more lanes would only take more memory."""

# How long a thread waits for a collective before it checks whether another rank has reported a failure.
_PATIENCE = timedelta(seconds=1)


class Executor:
    """Runs code in lanes, side by side on accelerators; here, what was called is done when it returns."""

    def __init__(self, channels: GroupChannels | PrivateChannels) -> None:
        self.channels = channels
        self.observer: Observer | None = None

    def begin(self, lane: int) -> None:
        """Let ``lane`` start after what the caller has done so far."""

    def begin_background(self) -> None:
        """Let the lanes of background work start after what the caller has done so far."""
        for lane in range(BACKGROUND_LANES):
            self.begin(lane)

    def scope(self, lane: int) -> AbstractContextManager[Any]:
        """The context for the code of a task in ``lane``."""
        return nullcontext()

    def wait(self, work: dist.Work) -> None:
        """Make what follows in the scope wait for ``work``."""
        work.wait()

    def wait_for_pass(self) -> None:
        """Make what follows in the scope wait for what has run in all other scopes so far."""

    def explained(self, error: Exception) -> Exception:
        """``error``, with which a collective could not be launched, or another rank's failure that it is due to."""
        return error


class HostExecutor(Executor):
    """For CPU tensors: to wait is to block the thread, and to look whether another rank has failed."""

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
                    raise _peer_error(failure) from error
                if work.is_completed():
                    waited_s = time.monotonic() - start_s
                    raise CollectiveError(
                        f"a collective failed after {waited_s:.1f} s and no rank reported an error of its own; "
                        f"a rank's process has ended, or hangs: {error}"
                    ) from error

    def explained(self, error: Exception) -> Exception:
        failures = self.channels.failures
        failure = failures.read() if failures is not None and isinstance(error, RuntimeError) else None
        return error if failure is None else _peer_error(failure)


def _peer_error(failure: str) -> PeerError:
    return PeerError(f"another rank of the group failed first: {failure}")


class StreamExecutor(Executor):
    """For accelerator tensors: each lane is a side stream; to wait is to make that stream wait, never the host.

    Collectives are launched and waited for with the lane's stream current, so events order it and the process group's
    own stream. What a stage allocates belongs to the lane's stream, and a work keeps its tensors alive until it is
    waited for; bucket buffers and parameters outlive the pass.
    """

    def __init__(self, channels: GroupChannels, device: torch.device) -> None:
        super().__init__(channels)
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._streams: list[Any] = []

    def begin(self, lane: int) -> None:
        """Let the lane's stream start after what the current stream has queued: in backward, the gradients."""
        while len(self._streams) <= lane:
            self._streams.append(self._module.Stream(device=self._device))
        self._streams[lane].wait_stream(self._module.current_stream(self._device))

    def scope(self, lane: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(self._streams[lane])
        return context

    def wait_for_pass(self) -> None:
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)


def executor_for(group: dist.ProcessGroup, device: torch.device) -> Executor:
    """An executor whose collectives run on ``group`` itself, for code on the calling thread."""
    channels = GroupChannels(group)
    return StreamExecutor(channels, device) if has_streams(device) else HostExecutor(channels)
