"""The connections that carry the collectives of one registration, and how its ranks report failures to each other.

[Note: names of connections]

The ranks of a registration find each other on a board each time that they connect: at first, and after each failure.
Registrations on one group connect again in any order, so a count over all of them would pair the connections of two
models. The board's name has the number of the registration, in the order of registering, which is the same on all
ranks, and how often this registration has connected. A rank that fails before it has connected again reports on the
board where the others are about to.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import Channel, GlooChannel, GroupChannel, backend_name, group_name
from overlap.errors import CollectiveError, ConfigurationError
from overlap.ranks.board import Board

_CPU = torch.device("cpu")
_REMEDY = "; every rank of the model's process group must register the same stages and run backward"

# How many registrations have connected on a group.
_connected: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class Channels:
    """The connections of one registration, one for each process group that its stages use.

    Args:
        group: the model's own. It belongs to the user: where stages use it itself there is nothing to open, close or
            report on.
        are_private: whether stages have connections of their own, which Gloo alone offers. They need those on a worker
            thread, since nothing orders its collectives and the training thread's (DDP's buffers, the user's metrics).
            One is made on first use by all ranks of its group, in the worker's order.
    """

    def __init__(self, group: dist.ProcessGroup, *, are_private: bool = False) -> None:
        self.group, self.are_private = group, are_private
        self.is_open = not are_private
        self.board: Board | None = None
        """Where these ranks report failures until they connect again; ``None`` where they are not about to connect."""
        self._channels: dict[dist.ProcessGroup, GlooChannel] = {}
        self._left: list[GlooChannel] = []
        self._shared: dict[dist.ProcessGroup, Channel] = {}
        # See [Note: names of connections].
        self._number: int | None = None
        self._attempts = itertools.count()
        self._name = ""

    @staticmethod
    def can_serve(group: dist.ProcessGroup) -> bool:
        """Whether collectives of CPU tensors on ``group`` can use separate connections."""
        return backend_name(group, _CPU) == "gloo"

    def for_group(self, group: dist.ProcessGroup | None) -> Channel:
        """The channel to the ranks of ``group``, the model's own where ``None``.

        Raises:
            ConfigurationError: ``group`` lacks Gloo for the CPU.
            CollectiveError: a rank is late.
        """
        used = self.group if group is None else group
        if self.are_private:
            channel = self._channels.get(used)
            return self._connected(used) if channel is None else channel
        if (own := self._shared.get(used)) is None:
            own = self._shared[used] = getattr(used, "overlap_channel", None) or GroupChannel(used)
        return own

    def _connected(self, group: dist.ProcessGroup) -> Channel:
        if not self.can_serve(group):
            raise ConfigurationError(
                f"a stage on CPU tensors uses a process group of backend {backend_name(group, _CPU)!r}; it needs one "
                "with Gloo for CPUs"
            )
        if group is not self.group:
            self.open()
            board = Board(group, self._name, fallback_board=self.board)
            channel = self._channels[group] = board.connect("gloo", purpose=_REMEDY)
            return channel
        channel = self._channels[group] = self._opened_board().connect("gloo", purpose=_REMEDY)
        self.is_open = True
        self._close_left()
        return channel

    def _opened_board(self) -> Board:
        """The board of the present connections, or else of the next. See [Note: names of connections]."""
        if self.board is None:
            if self._number is None:
                self._number = next(_connected.setdefault(self.group, itertools.count()))
            self._name = f"{group_name(self.group)}/{self._number}/{next(self._attempts)}"
            self.board = Board(self.group, self._name)
            self.board.disconnect = weakref.WeakMethod(self._leave)
        return self.board

    def open(self) -> None:
        """Connect to the other ranks of the model's group now, unless connected."""
        self.for_group(None)

    def report(self, error: BaseException) -> None:
        """Report an error of the training loop, which has left nothing in flight; the next use connects again.

        The connections stay open until then: another rank may still finish a collective on them, and be refused by
        itself. Where nothing is connected the ranks know of a failure already.
        """
        if self.board is not None:
            self.board.report(error)
            self._leave()

    def fail(self, error: BaseException) -> None:
        """Report ``error``, then close the connections, so that nobody waits for a timeout; the next use connects
        again. A group with a channel of its own is told."""
        if (own := getattr(self.group, "overlap_channel", None)) is not None:
            own.fail(error)
        # A failure that another rank caused is reported by that rank, or shows where the connections close.
        if self.are_private and not isinstance(error, CollectiveError):
            with contextlib.suppress(Exception):
                self._opened_board().report(error)
        self.abort()

    def abort(self) -> None:
        """Abandon what is in flight: the other ranks see their connections close. The next use connects again."""
        self._leave()
        self._close_left()

    def _leave(self) -> None:
        self._left += self._channels.values()
        self._channels.clear()
        self.board, self.is_open = None, not self.are_private

    def _close_left(self) -> None:
        while self._left:
            self._left.pop().abort()

    def forget_done(self) -> None:
        """Release the tensors of collectives that are done; called where collectives are issued."""
        for channel in self._channels.values():
            channel.forget_done()
