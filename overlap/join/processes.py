"""Whether the process of another rank on this machine has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ended_in_words", "has_ended", "this_process"]

_ENDED = ("Z", "X")  # Its parent has not taken note yet.


def this_process() -> list[str]:
    """What tells this process from all others, on this machine and elsewhere; empty where that is not known."""
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Numbers of processes are those of a container.
        space = str(Path("/proc/self/ns/pid").readlink())
        return [f"{machine} {space}", str(os.getpid()), _state_and_start(os.getpid())[1]]
    return []


def has_ended(process: list[str]) -> bool:
    """Whether the process that was :func:`this_process` of another rank has ended; ``False`` where it is elsewhere."""
    own = this_process()
    if not (own and process) or own[0] != process[0]:
        return False
    try:
        state, start = _state_and_start(int(process[1]))
    except OSError:
        return True
    return state in _ENDED or start != process[2]


def ended_in_words(processes: Sequence[list[str]]) -> str | None:
    """Which of ``processes``, by rank, have ended, for a message; ``None`` where none is known to have."""
    ended = [rank for rank, process in enumerate(processes) if has_ended(process)]
    return f"{' and '.join(f'the process of rank {rank}' for rank in ended)} has ended" if ended else None


def _state_and_start(pid: int) -> tuple[str, str]:
    # The name of the program, in parentheses, may have spaces. See proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
