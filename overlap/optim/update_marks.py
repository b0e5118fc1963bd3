"""The values that an update in backward used and wrote: none may change between backward and ``step()``.

In plain DDP the update comes with ``step()``, so it sees what the loop does after backward: a new learning rate, a
weight decay by hand, a state that is set to zero. An update that was made in backward cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
        tables: hyperparameters and state: what messages call each, and its values by name.
        parameters: what was updated, with the name of each.
        samples: note the parameters' values, too, to see a change through ``.data``.
    """

    def __init__(
        self, tables: Iterable[tuple[str, Mapping[Any, Any]]], parameters: Mapping[Tensor, str], *, samples: bool
    ) -> None:
        self._tables = [
            (label, table, {key: _Value(value) for key, value in table.items() if key != "params"})
            for label, table in tables
        ]
        self._parameters = [
            (p, name, version(p), fingerprint(p) if samples and not has_streams(p.device) else None)
            for p, name in parameters.items()
        ]

    def refuse_changes(self, *, step: str, deferred: str) -> None:
        """Raises: TrainingLoopError: something has changed since."""
        for label, table, values in self._tables:
            for key, value in values.items():
                if not value.is_still(table.get(key)):
                    now = _in_words_now(table.get(key))
                    raise TrainingLoopError(
                        f"{key!r} of {label} was changed from {value} to {now} between backward "
                        f"and {step}, but the update had been made in backward with {value}: change it before "
                        f"the backward or after {step}, or use {deferred}"
                    )
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


class _Value:
    """A hyperparameter or an entry of the state, at one moment."""

    def __init__(self, value: Any) -> None:
        self._value = value  # Kept, so that no other object takes its id.
        self._contents = _contents(value)

    def is_still(self, value: Any) -> bool:
        if value is self._value and isinstance(value, _PLAIN):
            return True
        return bool(self._contents == _contents(value))

    def __str__(self) -> str:
        return _in_words(self._contents)


@dataclass(frozen=True)
class _Opaque:
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
