"""The connections that carry the collectives of one registration, and how its ranks report failures to each other.

[Note: keys of connections]

The ranks of a registration find each other in the store by a key, each time that they connect: at first, and after each
failure. Several registrations on one group connect again in any order, since each has a thread of its own: what a rank
counts of all of them would pair the connections of two models. So a key has the number of the registration, by the
order in which ranks register, which is the same on all, and how often this registration has connected. All else that a
registration makes until it fails, such as the connections to the ranks of a smaller group, is named after that key.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import Channel, GroupChannel, backend_name, group_name
from overlap._torch.gloo import GlooChannel
from overlap.errors import CollectiveError, ConfigurationError
from overlap.join.failures import FailureStore
from overlap.join.leftovers import leave, release

__all__ = ["GroupChannels", "PrivateChannels"]

_SETTLING_S = 1.0
# Messages on the model's own group have tags far from those of other users of the group.
_FIRST_TAG = 1 << 20

# How many registrations have connected on a group.
_connected: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class GroupChannels:
    """The model's process group itself, for stages that run on the training thread.

    The group belongs to the user, so there is nothing to open or to close.
    """

    failures: FailureStore | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._tags = itertools.count(_FIRST_TAG)

    def of(self, group: dist.ProcessGroup | None) -> Channel:
        return GroupChannel(self.group if group is None else group)

    def next_tag(self) -> int:
        return next(self._tags)

    def open(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def tell(self, error: BaseException) -> None:
        pass

    def abort(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def forget_done(self) -> None:
        pass


class PrivateChannels:
    """Separate connections for a worker thread, one set for each process group that its stages use.

    Nothing orders the worker and the training thread, so their collectives (the stages' here; DDP's buffers and the
    user's metrics there) must not share connections. A channel is made on first use by all ranks of the group, in the
    worker's order, which is the same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._channels: dict[dist.ProcessGroup, GlooChannel] = {}
        self._left: list[GlooChannel] = []
        self._tags = itertools.count()
        self._closing: list[threading.Thread] = []
        # Where ranks have met, under which key, and what they have written there.
        self._met: list[tuple[dist.ProcessGroup, str, Sequence[str]]] = []
        # See [Note: keys of connections].
        self._number: int | None = None
        self._attempts = itertools.count()
        self._key = ""
        self.failures: FailureStore | None = None

    @staticmethod
    def can_serve(group: dist.ProcessGroup) -> bool:
        """Whether collectives of CPU tensors on ``group`` can use separate connections."""
        return backend_name(group, torch.device("cpu")) == "gloo"

    def of(self, group: dist.ProcessGroup | None) -> Channel:
        """The channel to the ranks of ``group``, the model's own where ``None``.

        Raises:
            ConfigurationError: ``group`` does not have Gloo for the CPU.
            CollectiveError: another rank did not connect in time.
        """
        group = self.group if group is None else group
        channel = self._channels.get(group)
        return self._connected(group) if channel is None else channel

    def _connected(self, group: dist.ProcessGroup) -> Channel:
        if not self.can_serve(group):
            raise ConfigurationError(
                f"a stage on CPU tensors uses a process group of backend "
                f"{backend_name(group, torch.device('cpu'))!r}; it needs one that has Gloo for the CPU"
            )
        if group is not self.group:
            self.open()
            return self._connect(group, self._key)
        key = self._new_key()
        failures = FailureStore(group, key)
        failures.say_back()
        channel = self._connect(group, key)
        self.failures = failures
        self._close_left()
        return channel

    def _connect(self, group: dist.ProcessGroup, key: str) -> Channel:
        channel = self._channels[group] = GlooChannel(group, key)
        self._met.append((group, key, GlooChannel.keys(group.size())))
        return channel

    def _new_key(self) -> str:
        """The key by which the ranks of the model's group meet this time. See [Note: keys of connections]."""
        if self._number is None:
            self._number = next(_connected.setdefault(self.group, itertools.count()))
        self._key = f"{group_name(self.group)}/{self._number}/{next(self._attempts)}"
        return self._key

    def next_tag(self) -> int:
        return next(self._tags)

    def open(self) -> None:
        """Connect to the other ranks of the model's group now, unless connected."""
        self.of(None)

    def fail(self, error: BaseException) -> None:
        """Report ``error`` to the other ranks, then close the connections, so that nobody waits for a timeout."""
        # A failure that another rank caused is reported by that rank, or shows where the connections close.
        if not isinstance(error, CollectiveError):
            with contextlib.suppress(Exception):
                self.open()  # If the last pass failed too, the ranks have not connected again yet.
            if self.failures is not None:
                self.failures.report(error)
        self.abort()

    def tell(self, error: BaseException) -> None:
        """Report ``error`` of the training loop, which has left nothing in flight here; the next use connects again.

        Only then are these connections closed: another rank may still finish on them what this one is done with, and
        learn by itself that it is refused, too. Where nothing is connected the ranks know of a failure already.
        """
        if self.failures is not None:
            self.failures.report(error)
            self._leave()

    def abort(self) -> None:
        """Abandon what is in flight; the other ranks see their connections close. The next use connects again."""
        self._leave()
        self._close_left()

    def _leave(self) -> None:
        self._left += self._channels.values()
        self._channels.clear()
        self._tags = itertools.count()
        self._release()

    def _release(self) -> None:
        """Take note that this rank has done with what it wrote to connect. See [Note: keys left behind]."""
        for group, key, names in self._met:
            release(group, f"overlap/{key}", partial(leave, size=group.size(), keys=names))
        self._met.clear()
        if self.failures is not None:
            self.failures.release()
            self.failures = None

    def _close_left(self) -> None:
        while self._left:
            self._closing.append(self._left.pop().abort())

    def forget_done(self) -> None:
        """Let go of the tensors of collectives that are done; called where collectives are issued."""
        for channel in self._channels.values():
            channel.forget_done()

    def settle(self) -> None:
        """Wait until nothing that was aborted can still write to its tensors, before they are used again.

        An operation that has received its data still adds it up, which takes moments. One that waits for data will
        receive none, since its connections are closed. The wait is bounded all the same.
        """
        deadline_s = time.monotonic() + _SETTLING_S
        while self._closing:
            self._closing.pop().join(max(0.0, deadline_s - time.monotonic()))
