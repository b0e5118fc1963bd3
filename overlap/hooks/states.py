"""The states of the ranks of a run, each made where it is looked at, and states that are not copied."""

from __future__ import annotations

import contextlib
import warnings
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
    """The value that each of the ``states`` has under ``key``; an empty dict where it has none."""
    if isinstance(states, StatesOfRanks):
        return StatesOfRanks(len(states), lambda rank: states[rank].get(key, {}))
    return [state.get(key, {}) for state in states]


def alike_in(states: Sequence[Any], rank: int, *, but: Collection[str]) -> dict[str, Any]:
    """The values of which ranks have the same, for ``rank``, so those of old rank ``rank`` modulo their number; all
    ``but`` these keys."""
    state = states[rank % len(states)]
    return {key: state[key] for key in state if key not in but}


_are_copied = True
_needs_no_warning = False


@contextlib.contextmanager
def uncopied() -> Iterator[None]:
    """Within it a whole run is saved or loaded, by code that copies or writes states at once: stages return their
    memory itself, and :func:`warn_of_memory` does not warn."""
    global _are_copied
    before, _are_copied = _are_copied, False
    try:
        yield
    finally:
        _are_copied = before


def copied(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` in a stage's state, or within :func:`uncopied` itself."""
    return tensor.clone() if _are_copied else tensor


def memory_is_saved() -> None:
    """The loop, or its framework, saves the memory of stages beside its optimizers."""
    global _needs_no_warning
    _needs_no_warning = True


def warn_of_memory(has_memory: Callable[[], bool], memory: str, *, stacklevel: int = 3) -> None:
    """An optimizer's state is saved or loaded by itself: warn, once in a process, of the ``memory`` that is not in it,
    where there is such; ``stacklevel`` is that of ``warnings.warn``."""
    if _needs_no_warning or not _are_copied or not has_memory():
        return
    memory_is_saved()
    warnings.warn(
        f"{memory} is not in the state of the optimizer, and a run that resumes without it gives other results: save "
        "with overlap.save(folder, ddp, optimizer) on every rank, and load with overlap.load(folder, ddp, optimizer)",
        UserWarning,
        stacklevel=stacklevel,
    )
