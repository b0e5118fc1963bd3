"""Waking a rank that waits inside of a collective for one that has left the block.

[Note: ranks that wait in C++]

A rank that leaves the block by an exception issues no more collectives, and tells the others in the store. But DDP
waits in C++, and nobody looks there. If a rank closes its connections, Gloo ends whatever waits on them, on all ranks.
The rank that failed must not do that: its script may clean up with the group, and an exception that all ranks raise at
the same place must leave the group usable. So the rank that waits does it, and only when it has issued more collectives
than one that has left, which never issues the next. Then nothing is lost: Gloo matches collectives by their order, so
none that the two issue later could complete. A rank that leaves since a collective of its own has failed has lost
connections, and the group is of no use to anybody: it says that it has issued none, and whoever waits is behind it.

Whether it waits in a forward, a backward, a step or a replay makes no difference, so nothing has to be told of them and
a step costs nothing. A rank that is only slow, or is stopped, has not left, and is waited for.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from overlap._threads import start
from overlap._torch.c10d import backend_name, issued
from overlap._torch.gloo import close_connections, has_lost_connection
from overlap.join.event_log import EventLog

__all__ = ["Waker"]

# A rank that has issued a collective since it was last looked at goes on, and nobody is asked.
_LOOKING_S = 0.5
_LEAVING_S = 1.0


class Waker:
    """Closes this rank's connections of ``group`` when it waits for a rank that has left; a thread, until stopped.

    Only on Gloo, for models on the CPU. See [Note: ranks that wait in C++].
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, log: EventLog) -> None:
        self._log = log
        self._ending = threading.Event()
        self._starter = threading.current_thread()
        self._thread: threading.Thread | None = None
        if group.size() > 1 and device.type == "cpu" and backend_name(group, device) == "gloo":
            self._backend = group._get_backend(device)
            self._begun = issued(self._backend) or 0
            self._thread = start(self._run, "overlap-waker", stop=self._ending.set)

    def _run(self) -> None:
        if threading.current_thread() is self._starter:
            return  # No thread can be started any more.
        before = None
        while not self._ending.wait(_LOOKING_S):
            now = self._issued
            if now == before and self._log.is_left_behind(now) and not self._ending.is_set():
                close_connections(self._backend)
                return
            before = now

    @property
    def _issued(self) -> int:
        """How many collectives this rank has issued since the block began."""
        return (issued(self._backend) or 0) - self._begun

    def stop(self, error: BaseException | None) -> None:
        """This rank leaves, and where it is with an ``error`` it tells the others how far it has come."""
        if self._thread is None:
            return
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVING_S)
        if error is not None:
            self._log.say_left(0 if _has_lost_connection(error) else self._issued)


def _has_lost_connection(error: BaseException | None) -> bool:
    """Whether ``error`` or what caused it is Gloo's."""
    while error is not None:
        if has_lost_connection(error):
            return True
        error = error.__cause__
    return False
