"""The states of the ranks of a run, read where they are looked at, and states that are not copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from torch import Tensor


class StatesOfRanks(Sequence[Any]):
    """The state of every rank of a run, in their order; one that lies in a file is read when it is indexed.

    Args:
        ranks: how many there are.
        read: returns what a rank's state has under a path of keys.
        keys: the keys of what it has there, without reading it.
    """

    def __init__(
        self,
        ranks: int,
        read: Callable[[int, tuple[str, ...]], Any],
        keys: Callable[[int, tuple[str, ...]], Sequence[str]],
        *,
        path: tuple[str, ...] = (),
        is_whole: bool = True,
    ) -> None:
        self._ranks, self._read, self._keys, self._path = ranks, read, keys, path
        self.is_whole = is_whole
        """Whether they are known to be in order, each once."""

    @classmethod
    def given(cls, states: Sequence[Any]) -> StatesOfRanks:
        """``states``, which may be a list of a user's."""
        if isinstance(states, StatesOfRanks):
            return states

        def read(rank: int, path: tuple[str, ...]) -> Any:
            found = states[rank]
            for key in path:
                found = found.get(key, {})
            return found

        def keys(rank: int, path: tuple[str, ...]) -> Sequence[str]:
            found = read(rank, path)
            return list(found) if isinstance(found, Mapping) else ()

        return cls(len(states), read, keys, is_whole=False)

    def of(self, key: str) -> StatesOfRanks:
        """What each has under ``key``; an empty dict where it has none."""
        return StatesOfRanks(self._ranks, self._read, self._keys, path=(*self._path, key), is_whole=self.is_whole)

    def keys(self, rank: int) -> Sequence[str]:
        """Those of one rank's, which is not read for that."""
        return self._keys(rank, self._path)

    def without(self, rank: int, *keys: str) -> dict[str, Any]:
        """One rank's, but for these ``keys``."""
        return {key: self.of(key)[rank] for key in self.keys(rank) if key not in keys}

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, place: int) -> Any: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...

    def __getitem__(self, place: int | slice) -> Any:
        found = range(self._ranks)[place]
        return [self[one] for one in found] if isinstance(found, range) else self._read(found, self._path)


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
