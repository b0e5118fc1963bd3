"""The states of the ranks of a run, each made where it is looked at, and states that are not copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor


class StatesOfRanks(Sequence[Any]):
    """The state of every rank of a run, each once and in their order; ``read(rank)`` returns one, when it is looked at.

    Where the states lie in files, a value in one is read when it is looked at.
    """

    def __init__(self, ranks: int, read: Callable[[int], Any]) -> None:
        self._ranks, self._read = ranks, read

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, place: Any) -> Any:
        found = range(self._ranks)[place]
        return [self._read(one) for one in found] if isinstance(found, range) else self._read(found)


def under(states: Sequence[Any], key: str) -> Sequence[Any]:
    """What each of the ``states`` has under ``key``; an empty dict where it has nothing."""
    if isinstance(states, StatesOfRanks):
        return StatesOfRanks(len(states), lambda rank: states[rank].get(key, {}))
    return [state.get(key, {}) for state in states]


def alike_in(states: Sequence[Any], rank: int, *, but: Collection[str]) -> dict[str, Any]:
    """The values of which ranks have the same, for ``rank``, so those of old rank ``rank`` modulo their number; all
    ``but`` these keys."""
    state = states[rank % len(states)]
    return {key: state[key] for key in state if key not in but}


_are_copied = True


@contextlib.contextmanager
def uncopied() -> Iterator[None]:
    """Within it stages return their memory itself as their state, to code that copies or writes it at once."""
    global _are_copied
    before, _are_copied = _are_copied, False
    try:
        yield
    finally:
        _are_copied = before


def copied(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in a stage's state, or within :func:`uncopied` itself."""
    return tensor.clone() if _are_copied else tensor
