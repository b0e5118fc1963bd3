"""The values that an update in backward used and wrote: none may change between backward and ``step()``.

In plain DDP the update comes with ``step()``, so it sees what the loop does after backward: a new learning rate, a
weight decay by hand, a state that is set to zero. An update that was made in backward cannot.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from overlap._torch.autograd import version, versions
from overlap._torch.device import has_streams
from overlap.errors import TrainingLoopError
from overlap.optim.fingerprint import fingerprints

__all__ = ["UpdateMarks"]

_PLAIN = (bool, int, float, complex, str, type(None))
_ATOMS = frozenset(_PLAIN)


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
        now = groups()
        self._members = [list(group["params"]) for group in now]
        self._hyperparameters = [_Noted(group) for group in now]
        self._state = [_Noted(state) if state else None for state in states()]
        self._names = parameters
        self._parameters = list(parameters)
        self._versions = versions(self._parameters)
        self._values: dict[int, Tensor] = {}
        if samples:
            sampled = [parameter for parameter in self._parameters if not has_streams(parameter.device)]
            self._values = dict(zip(map(id, sampled), fingerprints(sampled), strict=True))

    def refuse_changes(self, *, step: str, deferred: str) -> None:
        """Raises: TrainingLoopError: something has changed since."""
        groups = self._groups()
        for place, members in enumerate(self._members):
            now = _at(groups, place).get("params", ())
            if len(now) == len(members) and all(map(operator.is_, members, now)):
                continue
            kept = set(map(id, now))
            if any(id(parameter) not in kept for parameter in members):
                raise TrainingLoopError(
                    f"parameters were taken out of parameter group {place} between backward and {step}, but the update "
                    f"had been made in backward: take them out before the backward or after {step}, or use {deferred}"
                )
        for place, noted in enumerate(self._hyperparameters):
            if (found := noted.changed_in(_at(groups, place))) is not None:
                raise _error(f"parameter group {place}", found, step, deferred)
        now_states = self._states() if any(self._state) else [{}] * len(self._state)
        for owner, state_noted, state in zip(self._owners, self._state, now_states, strict=True):
            if state_noted is not None and (found := state_noted.changed_in(state)) is not None:
                raise _error(f"the state of {owner}", found, step, deferred)
        if changed := [self._names[parameter] for parameter in self._changed()]:
            raise TrainingLoopError(
                f"{changed[0]} (and {len(changed) - 1} other parameters) was changed between backward and {step}, but "
                f"its update had been made in backward already, and plain DDP makes it after the change: change "
                f"parameters after {step}, or use {deferred}"
            )

    def _changed(self) -> list[Tensor]:
        """The parameters that are not what they were."""
        now = versions(self._parameters)
        if not self._values:
            if now == self._versions:
                return []
            before = zip(self._parameters, now, self._versions, strict=True)
            return [parameter for parameter, version_now, noted in before if version_now != noted]
        sampled = [parameter for parameter in self._parameters if id(parameter) in self._values]
        values = {id(parameter): value for parameter, value in zip(sampled, fingerprints(sampled), strict=True)}
        return [
            parameter
            for parameter, version_now, noted in zip(self._parameters, now, self._versions, strict=True)
            if (
                bool(values[id(parameter)] != self._values[id(parameter)])
                if id(parameter) in values
                else version_now != noted
            )
        ]


def _at(groups: Sequence[Mapping[str, Any]], place: int) -> Mapping[str, Any]:
    return groups[place] if place < len(groups) else {}


class _Noted:
    """The values of a group or of a parameter's state, at one moment."""

    __slots__ = ("_contents", "_values")

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = dict(values)  # Kept, so that no other object takes their ids.
        # Of plain values the value itself tells; what a group's list of parameters holds is looked at by itself.
        self._contents = {
            key: _contents(value) for key, value in values.items() if type(value) not in _ATOMS and key != "params"
        }

    def changed_in(self, now: Mapping[Any, Any]) -> tuple[Any, str, Any] | None:
        """The first key of which the value is another one: the key, in words what it was, and the value now."""
        before = self._values
        if before.keys() == now.keys() and all(map(operator.is_, before.values(), map(now.get, before))):
            keys: Iterable[Any] = self._contents
        else:
            keys = before
        for key in keys:
            value = now.get(key)
            if key == "params" or (value is before[key] and type(value) in _ATOMS):
                continue
            contents = self._contents[key] if key in self._contents else before[key]
            if contents != _contents(value):
                return key, _in_words(contents), value
        return None


def _error(whose: str, found: tuple[Any, str, Any], step: str, deferred: str) -> TrainingLoopError:
    key, before, now = found
    return TrainingLoopError(
        f"{key!r} of {whose} was changed from {before} to {_in_words_now(now)} between backward and {step}, but the "
        f"update had been made in backward with {before}: change it before the backward or after {step}, or use "
        f"{deferred}"
    )


class _Opaque(NamedTuple):
    """A value that only its identity and version distinguish from another."""

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
