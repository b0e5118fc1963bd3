"""The library's own connections to the key-value stores of process groups."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# The package exports it at run time, but not to type checkers.
from torch._C._distributed_c10d import TCPStore

from overlap._torch.c10d import PrefixStore, group_store, group_timeout

__all__ = ["GroupStore"]

_connecting = threading.Lock()
_stores: WeakKeyDictionary[dist.ProcessGroup, GroupStore] = WeakKeyDictionary()


class GroupStore:
    """The store of a process group, over a connection of the library's own; made by :meth:`of`, once a group.

    Rank 0 or torchrun's agent hosts the usual store, a ``TCPStore``. A call of its client blocks for as long as the
    host is suspended, whatever its timeout, and meanwhile every other thread that calls that client. So the library has
    a client of its own, whose socket gives up when the host has been silent for the group's timeout. An answer that
    comes later would be taken for that of the next call, so the connection is then closed. (On Linux; elsewhere a call
    waits for the host.)
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = group_store(group)
        root: Any = store
        while isinstance(root, PrefixStore):
            root = root.underlying_store
        self._port = root.port if isinstance(root, TCPStore) else None
        self._addresses: set[Any] = set()
        if self._port is not None:
            seconds, rest_s = divmod(group_timeout(group, torch.device("cpu")).total_seconds(), 1)
            limit = struct.pack("ll", int(seconds), max(1, int(1e6 * rest_s)))
            with _connecting:
                before = {one.getsockname() for one in _sockets_to(self._port)}
                store = getattr(store, "clone")()  # noqa: B009 - missing in the stubs
                for one in _sockets_to(self._port):
                    if one.getsockname() not in before:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                        self._addresses.add(one.getsockname())
        self._store = store

    @staticmethod
    def of(group: dist.ProcessGroup) -> GroupStore:
        """The one of ``group``. Raises: RuntimeError: it cannot be connected to."""
        if (found := _stores.get(group)) is None:
            found = _stores[group] = GroupStore(group)
        return found

    def under(self, prefix: str) -> PrefixStore:
        """The store with ``prefix`` before every key."""
        return PrefixStore(prefix, self._store)

    def close(self) -> None:
        """Close the connection, after a call that has failed: no later one is made."""
        for one in () if self._port is None else _sockets_to(self._port):
            with contextlib.suppress(OSError):
                if one.getsockname() in self._addresses:
                    one.shutdown(socket.SHUT_RDWR)


def _sockets_to(port: int) -> Iterator[socket.socket]:
    """This process's TCP connections to ``port``. Private: a store does not say which is its own."""
    descriptors = Path("/proc/self/fd")
    for entry in descriptors.iterdir() if descriptors.exists() else ():
        with contextlib.suppress(OSError):  # It may be closed meanwhile.
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                    if is_tcp and one.getpeername()[1] == port:
                        yield one
