"""Whether all ranks call the same collective of tensors of the same size, found out before bytes are exchanged.

[Note: compared once]

Messages of other sizes than expected end the process inside of Gloo. So the ranks compare a call the first time that
they make it, in the group's store. A call that all have made before is the same on every rank, or new on none. If a
rank makes a new one where others make one that is known, these wait for it in an exchange; every second they look
whether a rank compares this call, and take part.
"""

from __future__ import annotations

import torch.distributed as dist

from overlap.errors import CollectiveError
from overlap.join.board import Board

__all__ = ["SameCalls"]


class SameCalls:
    """Compares what the ranks of ``group`` call. Issues no collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._board = Board(group, "quantized")
        self._known: set[str] = set()

    def check(self, number: int, call: str) -> None:
        """Compare ``call``, the ``number``-th on this group, with those of the other ranks unless it is known.

        Raises:
            CollectiveError: another rank calls something else, or calls nothing within the group's timeout.
        """
        if call not in self._known and self._board.size > 1:
            self._compare(number, call)
            self._known.add(call)

    def answer(self, number: int, call: str) -> None:
        """As :meth:`check`, where another rank compares; called while this one waits in ``call``."""
        if self._board.is_gathering(str(number)):
            self._compare(number, call)

    def _compare(self, number: int, call: str) -> None:
        calls = self._board.gather(str(number), call, purpose=f" to call a quantized {call}")
        self._board.delete(kept=1)  # All have come, so all have read what they compared before.
        if len(set(calls)) > 1:
            told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
            raise CollectiveError(f"ranks call different quantized collectives: {told}; call the same on every rank")
