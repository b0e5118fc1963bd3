"""The TCP connection of a store's client.

Private: there is no public way to it, so it is found among the process's sockets by the port of the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The package exports it at run time, but not to type checkers.
from torch._C._distributed_c10d import TCPStore

__all__ = ["StoreConnection"]

# Linux gives a connection up by itself after about so long.
_USUAL_S = 900.0


class StoreConnection:
    """The connection of ``store``, which it does not keep alive. Does nothing where there is none, or no Linux."""

    def __init__(self, store: Any) -> None:
        self._port = store.port if isinstance(store, TCPStore) else None

    def limit_silence(self, seconds: float) -> None:
        """Have a call fail when the network has not acknowledged what it sent for so many ``seconds``.

        The store's client waits for an answer as long as the connection lasts: where packets vanish, a quarter of an
        hour. A host that hangs is another thing: its kernel acknowledges what it gets.
        """
        if seconds < _USUAL_S and hasattr(socket, "TCP_USER_TIMEOUT"):
            for found in self._sockets():
                with contextlib.suppress(OSError):
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))

    def cut(self) -> None:
        """Have the call that is under way fail, and all that come."""
        for found in self._sockets():
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)

    def _sockets(self) -> Iterator[socket.socket]:
        if self._port is None:
            return
        with contextlib.suppress(OSError):
            for entry in Path("/proc/self/fd").iterdir():
                # A descriptor may be closed meanwhile.
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                        with socket.socket(fileno=os.dup(int(entry.name))) as found:
                            if self._leads_to_store(found):
                                yield found

    def _leads_to_store(self, found: socket.socket) -> bool:
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        return is_tcp and found.getpeername()[1] == self._port
