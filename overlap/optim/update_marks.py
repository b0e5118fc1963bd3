"""The values that an update in backward used and wrote: none may change between backward and ``step()``.

In plain DDP the update comes with ``step()``, so it sees what the loop does after backward: a new learning rate, a
weight decay by hand, a state that is set to zero. An update that was made in backward cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from overlap._torch.autograd import version
from overlap._torch.device import has_streams
from overlap.errors import TrainingLoopError
from overlap.optim.fingerprint import fingerprint

__all__ = ["UpdateMarks"]

_PLAIN = (bool, int, float, complex, str, type(None))


class UpdateMarks:
    """Parameters, hyperparameters and state as an update in backward left them.

    Args:
        groups: gives the parameter groups as they are. Asked again in ``step()``, since the loop may put another
            dictionary in the place of one.
        states: likewise the state of each parameter of ``owners``, in their order.
        owners: what messages call the parameters that have state.
        parameters: what was updated, with the name of each.
        samples: note the parameters' values, too, to see a change through ``.data``.
    """

    def __init__(
        self,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        states: Callable[[], Sequence[Mapping[Any, Any]]],
        owners: Sequence[str],
        parameters: Mapping[Tensor, str],
        *,
        samples: bool,
    ) -> None:
        self._groups = groups
        self._states = states
        self._owners = owners
        self._members = [list(group["params"]) for group in groups()]
        self._hyperparameters = [_noted(group) for group in groups()]
        self._state = [_noted(state) for state in states()]
        self._parameters = [
            (p, name, version(p), fingerprint(p) if samples and not has_streams(p.device) else None)
            for p, name in parameters.items()
        ]

    def refuse_changes(self, *, step: str, deferred: str) -> None:
        """Raises: TrainingLoopError: something has changed since."""
        groups = self._groups()
        for place, members in enumerate(self._members):
            kept = set(map(id, _at(groups, place).get("params", ())))
            if any(id(parameter) not in kept for parameter in members):
                raise TrainingLoopError(
                    f"parameters were taken out of parameter group {place} between backward and {step}, but the update "
                    f"had been made in backward: take them out before the backward or after {step}, or use {deferred}"
                )
        for place, noted in enumerate(self._hyperparameters):
            if (found := _changed(noted, _at(groups, place))) is not None:
                raise _error(f"parameter group {place}", found, step, deferred)
        for owner, noted, state in zip(self._owners, self._state, self._states(), strict=True):
            if (found := _changed(noted, state)) is not None:
                raise _error(f"the state of {owner}", found, step, deferred)
        changed = [name for p, name, before, values in self._parameters if _has_changed(p, before, values)]
        if changed:
            raise TrainingLoopError(
                f"{changed[0]} (and {len(changed) - 1} other parameters) was changed between backward and {step}, but "
                f"its update had been made in backward already, and plain DDP makes it after the change: change "
                f"parameters after {step}, or use {deferred}"
            )


def _has_changed(parameter: Tensor, before: int, values: Tensor | None) -> bool:
    if values is not None:
        return bool(fingerprint(parameter) != values)
    return version(parameter) != before


def _at(groups: Sequence[Mapping[str, Any]], place: int) -> Mapping[str, Any]:
    return groups[place] if place < len(groups) else {}


def _noted(values: Mapping[Any, Any]) -> dict[Any, _Value]:
    return {key: _Value(value) for key, value in values.items() if key != "params"}


def _changed(noted: dict[Any, _Value], now: Mapping[Any, Any]) -> tuple[Any, _Value, Any] | None:
    """The first key of which the value is another one: the key, the value that was noted and the one there is now."""
    for key, value in noted.items():
        if not value.is_still(now.get(key)):
            return key, value, now.get(key)
    return None


def _error(whose: str, found: tuple[Any, _Value, Any], step: str, deferred: str) -> TrainingLoopError:
    key, before, now = found
    return TrainingLoopError(
        f"{key!r} of {whose} was changed from {before} to {_in_words_now(now)} between backward and {step}, but the "
        f"update had been made in backward with {before}: change it before the backward or after {step}, or use "
        f"{deferred}"
    )


class _Value:
    """A hyperparameter or an entry of the state, at one moment."""

    __slots__ = ("_contents", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value  # Kept, so that no other object takes its id.
        self._contents = _contents(value)

    def is_still(self, value: Any) -> bool:
        if value is self._value and isinstance(value, _PLAIN):
            return True
        return bool(self._contents == _contents(value))

    def __str__(self) -> str:
        return _in_words(self._contents)


class _Opaque(NamedTuple):
    """What only its identity and version tell from another value."""

    identity: int
    version: int = 0


def _contents(value: Any) -> Any:
    """What tells a value from another one; a number in a tensor may be replaced by an equal one."""
    if isinstance(value, Tensor):
        is_readable = value.numel() == 1 and not value.is_complex() and not has_streams(value.device)
        return float(value) if is_readable else _Opaque(id(value), version(value))
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if isinstance(item, _PLAIN)}
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, _PLAIN)]
    return value if isinstance(value, _PLAIN) else _Opaque(id(value))


def _in_words(contents: Any) -> str:
    return "what it was" if isinstance(contents, _Opaque) else repr(contents)


def _in_words_now(value: Any) -> str:
    contents = _contents(value)
    return "something else" if isinstance(contents, _Opaque) else repr(contents)
