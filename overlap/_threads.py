"""Threads that have ended before the interpreter goes.

[Note: the end of the interpreter]

A daemon thread that comes back from C++ while the interpreter is going is ended by force. C++ takes that for an error
in the frames below, and aborts the process: a script that was done ends with SIGABRT. A thread that is not a daemon
would keep a script that has failed from ending. So threads are daemons, and when the script has ended, but the
interpreter still works, they are asked to stop and waited for: the work in flight is finished, since other ranks may be
waiting for it. What does not end by itself is abandoned.

A thread that has done its work is waited for, too, until it is gone: last of all it drops its references. To drop
a work of a collective, PyTorch gives the interpreter's lock away and takes it back, which is such a return from C++.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_FINISHING_S = 60.0
# After an exception other ranks may never come, and should soon see this one end.
_FINISHING_AFTER_EXCEPTION_S = 5.0
_CLOSING_S = 5.0


@dataclass(frozen=True)
class _Ending:
    stop: Callable[[], None]
    abandon: Callable[[], None]


_running: dict[threading.Thread, _Ending] = {}
"""Also those that have done their work but may not be gone: see [Note: the end of the interpreter]."""
_DONE = _Ending(stop=lambda: None, abandon=lambda: None)


def start(
    target: Callable[[], None],
    name: str,
    *,
    stop: Callable[[], None] = lambda: None,
    abandon: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Start a thread; see [Note: the end of the interpreter].

    Args:
        target: the function that it runs.
        name: the thread's name.
        stop: asks it to end when it has done its work.
        abandon: makes it end sooner, if it waits for other ranks.
    """

    def run() -> None:
        try:
            target()
        finally:
            if thread in _running:
                _running[thread] = _DONE  # What stops it may hold a model.

    for other, ending in list(_running.items()):
        if ending is _DONE and not other.is_alive():
            _running.pop(other, None)
    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = _Ending(stop, abandon)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no thread when the script has ended.
        del _running[thread]
        run()
    return thread


def _end_all() -> None:
    ending = dict(_running)
    for one in ending.values():
        one.stop()
    # Set where an exception has ended the script.
    has_failed = hasattr(sys, "last_value")
    _join(_running, _FINISHING_AFTER_EXCEPTION_S if has_failed else _FINISHING_S)
    for thread, one in ending.items():
        if thread.is_alive():
            one.abandon()
    _join(_running, _CLOSING_S)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    for thread in list(threads):
        thread.join(max(0.0, deadline_s - time.monotonic()))


atexit.register(_end_all)
