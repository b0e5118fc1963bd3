"""What carries the collectives of one registration, and how its ranks tell each other of failures."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import Channel, GlooChannel, GroupChannel, backend_name
from overlap.errors import ConfigurationError
from overlap.join.failures import FailureStore

__all__ = ["GroupChannels", "PrivateChannels"]

_SETTLING_S = 1.0
# On the model's own group, away from the messages of whoever else uses it.
_FIRST_TAG = 1 << 20

# How many channels this process has made on a group. Ranks register and fail together, so the count is the same on
# all of them and can name the keys under which they meet.
_made: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def _next_key(group: dist.ProcessGroup) -> str:
    return str(next(_made.setdefault(group, itertools.count())))


class GroupChannels:
    """The model's process group itself, for stages that run on the training thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._tags = itertools.count(_FIRST_TAG)

    failures: FailureStore | None = None

    def of(self, group: dist.ProcessGroup | None) -> Channel:
        return GroupChannel(self._group if group is None else group)

    def next_tag(self) -> int:
        return next(self._tags)

    def open(self) -> None:
        """Nothing to make: the group is there."""

    def abort(self) -> None:
        """Nothing to give up: the group is the user's."""

    def settle(self) -> None:
        """Nothing was given up."""


class PrivateChannels:
    """Connections of a worker thread's own, one set for each process group that its stages use.

    What a worker issues must never interleave with collectives of the training thread (DDP's buffers, the user's
    metrics) on the same connections, since nothing orders the two threads. Channels are made on first use by all
    ranks of the group, in the worker's order, which is the same on every rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._channels: dict[dist.ProcessGroup, Channel] = {}
        self._tags = itertools.count()
        self._closing: list[threading.Thread] = []
        self.failures: FailureStore | None = None

    @staticmethod
    def can_serve(group: dist.ProcessGroup) -> bool:
        """Whether collectives of CPU tensors on ``group`` can go over connections of our own."""
        return backend_name(group, torch.device("cpu")) == "gloo"

    def of(self, group: dist.ProcessGroup | None) -> Channel:
        group = self._group if group is None else group
        channel = self._channels.get(group)
        if channel is None:
            if not self.can_serve(group):
                raise ConfigurationError(
                    f"a stage on CPU tensors uses a process group of backend "
                    f"{backend_name(group, torch.device('cpu'))!r}; it needs one that has Gloo for the CPU"
                )
            key = _next_key(group)
            channel = self._channels[group] = GlooChannel(group, key)
            if group is self._group:
                self.failures = FailureStore(group, key)
        return channel

    def next_tag(self) -> int:
        return next(self._tags)

    def open(self) -> None:
        """Connect with the other ranks now."""
        self.of(None)

    def settle(self) -> None:
        """Wait until nothing that was aborted can write to its tensors any more, before they are filled anew.

        An operation that has data still adds it up; that takes moments. One that waits for data will have none, since
        its connections are closed, and may wait for the group's timeout: that one is left to itself.
        """
        deadline_s = time.monotonic() + _SETTLING_S
        while self._closing:
            self._closing.pop().join(max(0.0, deadline_s - time.monotonic()))

    def abort(self) -> None:
        """Give up what is in flight; the other ranks see their connections close. The next use connects anew."""
        for channel in self._channels.values():
            if (closing := channel.abort()) is not None:
                self._closing.append(closing)
        self._channels.clear()
        self._tags = itertools.count()
        self.failures = None
