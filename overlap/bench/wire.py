"""Bytes that this process has sent, read where they leave it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from overlap.bench.collectives import counted_bytes
from overlap.bench.link import INTERFACE
from overlap.bench.settings import LinkKind

# Offsets in Linux's `struct tcp_info`, whose layout is part of the kernel's stable interface.
_BYTES_SENT_OFFSET = 200
_BYTES_RETRANSMITTED_OFFSET = 208


def sent_bytes_counter(link: LinkKind) -> Callable[[], float]:
    """The counter that fits a link: its interface, the process's sockets, or the collectives."""
    if link == "namespaces":
        return _interface_bytes
    return socket_bytes if link == "loopback" else counted_bytes


def _interface_bytes() -> float:
    """What left the namespace's one interface; all of it is this rank's, headers included.

    Without what was sent twice: that says how busy the machine was, and not what a variant sends.
    """
    left = int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())
    return float(left - sum(again for _, again in _of_all_sockets()))


def socket_bytes() -> float:
    """Payload sent on every TCP socket that this process has open; loopback's own counter mixes all ranks."""
    return float(sum(sent - again for sent, again in _of_all_sockets()))


def _of_all_sockets() -> list[tuple[int, int]]:
    """Of every TCP socket that this process has open: the bytes sent, and those of them that were sent again."""
    return [_sent_on(int(entry.name)) for entry in Path("/proc/self/fd").iterdir()]


def _sent_on(descriptor: int) -> tuple[int, int]:
    try:
        if not Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("socket:"):
            return 0, 0
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.type != socket.SOCK_STREAM or duplicate.family == socket.AF_UNIX:
                return 0, 0
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        # Closed since it was listed, or not TCP.
        return 0, 0
    if len(info) < _BYTES_RETRANSMITTED_OFFSET + 8:
        return 0, 0
    (sent,) = struct.unpack_from("Q", info, _BYTES_SENT_OFFSET)
    (again,) = struct.unpack_from("Q", info, _BYTES_RETRANSMITTED_OFFSET)
    return int(sent), int(again)
