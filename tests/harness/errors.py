"""How a world of ranks can fail."""

from __future__ import annotations


class WorldError(Exception):
    """A rank of a world failed; the message says which one and why, then what the others did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailed(WorldError):
    """`fn` raised on a rank: `exception` is what it raised, the message holds that rank's traceback."""

    def __init__(self, rank: int, message: str, exception: BaseException) -> None:
        super().__init__(rank, message)
        self.exception = exception


class RankDied(WorldError):
    """A rank's process ended without a result: `exitcode` is negative for a signal, as in `subprocess`."""

    def __init__(self, rank: int, message: str, exitcode: int | None) -> None:
        super().__init__(rank, message)
        self.exitcode = exitcode


class RankHung(WorldError):
    """A rank had no result when the time was up; the message holds the stacks of its threads."""
