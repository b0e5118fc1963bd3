"""What ``state_dict()`` returns between one consolidation and the next change of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overlap.errors import TrainingLoopError
from overlap.optim.zero.consolidation import packed_groups

__all__ = ["WholeState"]


class WholeState:
    """The whole state in the form of the plain optimizer, as long as it is current, on the ranks that hold it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changes = 0
        self._taken_at: int | None = None
        self._state: dict[str, Any] | None = None

    @property
    def is_untouched(self) -> bool:
        """Whether no rank has changed its state since the optimizer was made."""
        return self._changes == 0

    @property
    def is_current(self) -> bool:
        """Whether the state was consolidated, for any rank, since it last changed."""
        return self._taken_at == self._changes

    def note_change(self) -> None:
        """An update or a loaded state makes what was consolidated stale; its memory is released."""
        self._changes += 1
        self._state = None

    def reset(self) -> None:
        """The state is again what it was when the optimizer was made."""
        self._changes, self._taken_at, self._state = 0, None, None

    def keep(self, state: dict[str, Any] | None) -> None:
        """Keep what was consolidated; ``None`` if that was for another rank, which takes nothing away from this one."""
        if state is not None:
            self._state = state
        self._taken_at = self._changes

    def packed(self, param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A ``state_dict()`` with these groups, which the caller may change; empty if another rank holds the state.

        Raises:
            TrainingLoopError: the state was not consolidated since it last changed.
        """
        if not self.is_current:
            raise TrainingLoopError(
                "the state is divided among the ranks, and was not consolidated since it last changed: call "
                f"consolidate_state_dict(to={self._rank}), or to=None for all ranks, on every rank right before "
                "state_dict(), or save sharded_state_dict() instead"
            )
        if self._state is None:
            return {}
        state = {
            key: dict(of_one) if isinstance(of_one, dict) else of_one for key, of_one in self._state["state"].items()
        }
        entries = {key: value for key, value in self._state.items() if key != "state"}
        return {"state": state, "param_groups": packed_groups(param_groups), **entries}
