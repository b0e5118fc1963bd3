"""Communicators for stages on a device with streams, and how their ranks learn of each other's failures.

[Note: failures on a device]

The host runs ahead of the device and never waits for a collective, so it cannot notice there that another rank has
failed; the device would wait for ever. So

- what stages issue has communicators of its own, which can be aborted: what is in flight then ends, unfinished, and the
  streams go on;
- a rank that fails makes its streams wait for what it has in flight, writes its error to a board in the store, and
  aborts its communicators;
- a thread on each rank looks at the board, and whether the device still gets on. What it finds makes it abort this
  rank's communicators. The training thread, or autograd's, is told where it comes by next: at a bucket, at the end of
  backward, in ``step()``, at the next forward.

A healthy step costs next to nothing: the thread asks the store twice a second, and the training thread looks at an
attribute. What the host has queued behind an aborted collective runs with what is in its tensors by then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap._threads import start
from overlap._torch.c10d import Channel, GroupChannel, group_exists
from overlap._torch.communicators import CommunicatorChannel, can_have_communicator, keys_of_meeting, meet
from overlap.errors import CollectiveError, PeerError
from overlap.hooks.engine.channels import PrivateChannels
from overlap.join.failures import FailureStore

__all__ = ["DeviceChannels"]

_LOOKING_S = 0.5

_UNFINISHED = (
    "what this rank had queued has run on unfinished collectives, so load parameters and optimizer state from a "
    "checkpoint, on every rank, before going on"
)


class DeviceChannels(PrivateChannels):
    """Communicators for stages that run on the training thread, one for each process group that they use.

    The order of collectives is the program's, the same on every rank, over all of them and the user's own. See
    [Note: failures on a device].
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        # Between the training thread, autograd's, and the one that looks.
        self._lock = threading.Lock()
        self._watch: _Watch | None = None
        self._noted: tuple[type[CollectiveError], str] | None = None

    def of(self, group: dist.ProcessGroup | None) -> Channel:
        """The channel to the ranks of ``group``, the model's own where ``None``.

        Raises:
            PeerError: another rank has failed.
            CollectiveError: another rank did not come in time, or the device does not get on.
        """
        self._look()
        return super().of(group)

    def _connected(self, group: dist.ProcessGroup) -> Channel:
        self.open()
        # A group of another backend is used as it is: on this thread nothing else comes between.
        channel: Channel = GroupChannel(group)
        if can_have_communicator(group, self._device):
            key = f"{self._key}/communicator"
            channel = CommunicatorChannel(group, key, self._device, self._look)
            self._met.append((group, key, keys_of_meeting(group.size())))
        with self._lock:
            self._channels[group] = channel
        self._look()  # What was noted in between has not aborted this one.
        return channel

    def open(self) -> None:
        """Meet the other ranks of the model's group, unless that is done; communicators are made when they are used.

        Raises: as :meth:`of`.
        """
        self._look()
        if self.failures is not None:
            return
        key = self._new_key()
        failures = FailureStore(self.group, key)
        failures.say_back()
        meet(self.group, key, self._device, lambda: None)
        self._met.append((self.group, key, keys_of_meeting(self.group.size())))
        with self._lock:
            self.failures = failures
            self._watch = _Watch(self.group, self.failures, self)

    def failure(self) -> CollectiveError | None:
        if (noted := self._noted) is None:
            return None
        kind, what = noted
        return kind(f"{what}; {_UNFINISHED}")

    def _look(self) -> None:
        if (error := self.failure()) is not None:
            raise error

    def check(self) -> None:
        """Look whether the device still gets on. Raises: RuntimeError: it does not."""
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            if isinstance(channel, CommunicatorChannel):
                channel.check()

    def note(self, watch: _Watch, kind: type[CollectiveError], what: str) -> None:
        """Called by the thread that looks: have all that is in flight end, and tell the training thread."""
        with self._lock:
            if self._watch is not watch:
                return  # This rank has failed itself, or has begun anew.
            self._noted = kind, what
            for channel in self._channels.values():
                channel.abort()

    def tell(self, error: BaseException) -> None:
        """Does nothing: what other ranks are told aborts what they have in flight, which may be a finished backward's,
        of a loop that is about to be refused there, too."""

    def _is_to_be_told(self, error: BaseException) -> bool:
        return not isinstance(error, PeerError)

    def abort(self) -> None:
        """Abandon what is in flight. The next use connects again."""
        with self._lock:
            watch, self._watch = self._watch, None
            super().abort()
            self._noted = None
        if watch is not None:
            watch.end()

    def close(self) -> None:
        """Give the communicators back when what is in flight is done; returns at once."""
        with self._lock:
            watch, self._watch = self._watch, None
            channels = list(self._channels.values())
            self._channels.clear()
            self._release()
        if watch is not None:
            watch.end(closing=channels)

    def end(self) -> None:
        """Called when the script has ended: :meth:`close`, or where an exception has ended it, tell the others."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None:
            self.close()
        else:
            self.fail(error)


class _Watch:
    """A thread that looks whether a rank has failed, and closes the channels in the end."""

    def __init__(self, group: dist.ProcessGroup, failures: FailureStore, channels: DeviceChannels) -> None:
        self.group = group
        self._failures = failures
        self._channels = channels
        self._closing: Sequence[Channel] = ()
        self._is_over = threading.Event()
        start(self._run, "overlap-watch", stop=channels.end, abandon=self._abandon)

    def end(self, *, closing: Sequence[Channel] = ()) -> None:
        """Have the thread close these channels, and end."""
        self._closing = closing
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOKING_S) and self._is_well():
            if not group_exists(self.group):
                self._channels.close()
        self._is_over.wait()
        for channel in self._closing:
            channel.close()

    def _is_well(self) -> bool:
        error: RuntimeError | None = None
        try:
            self._channels.check()
        except RuntimeError as raised:
            error = raised
        try:
            # After the check: a rank that fails writes here before it breaks connections.
            failure = self._failures.look()
        except RuntimeError:
            failure = None  # The rank that held the store has ended, perhaps because all is done.
            if error is None:
                return False
        if failure is not None:
            self._channels.note(self, PeerError, f"another rank of the group failed first: {failure}")
        elif error is not None:
            self._channels.note(
                self,
                CollectiveError,
                "a collective failed and no rank reported an error of its own; a rank's process has ended, or hangs: "
                f"{error}",
            )
        return failure is None and error is None

    def _abandon(self) -> None:
        for channel in self._closing:
            channel.abort()
