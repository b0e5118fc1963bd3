"""What a step writes: a group's, an optimizer's or a state's values before it beside those after it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from overlap._torch.autograd import version

__all__ = ["StepSnapshot"]

_PLAIN = (bool, int, float, str)
_ATOMS = frozenset({*_PLAIN, type(None)})
_ABSENT = object()


class StepSnapshot:
    """Values before a step, to tell which of them it changed: those replaced, and those changed in place."""

    def __init__(self, values: Mapping[Any, Any], *, skipped: frozenset[str] = frozenset()) -> None:
        self._skipped = skipped
        self._before = dict(values)
        self._contents = [
            (key, value, _contents(value))
            for key, value in values.items()
            if type(value) not in _ATOMS and key not in skipped
        ]

    def changed(self, values: Mapping[Any, Any]) -> list[Any]:
        """The keys whose values are not what they were."""
        before = self._before
        changed = [
            key for key, value, contents in self._contents if key in values and not _is_same(contents, _contents(value))
        ]
        if len(before) == len(values) and all(map(operator.is_, before.values(), values.values())):
            return changed  # As in nearly every step: all objects are the same ones, in the same order.
        others = [
            key
            for key, value in values.items()
            if key not in self._skipped and key not in changed and not _is_same(before.get(key, _ABSENT), value)
        ]
        return [*changed, *others]


def _contents(value: Any) -> Any:
    """What tells an object that was changed in place from one that was not, as far as plain values go."""
    if isinstance(value, Tensor):
        return version(value)
    if isinstance(value, dict):
        return tuple((key, item) for key, item in value.items() if isinstance(item, _PLAIN))
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, _PLAIN))
    return None


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(after, (bool, int, float, str, tuple)) and type(before) is type(after):
        return bool(before == after)
    return False
