"""The state of this rank's part under the whole parameters, as a loop sees and resets it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.optim.zero.sharding import Shard

__all__ = ["StateView"]

_MISSING = object()


class StateView(defaultdict[Any, Any]):
    """``optimizer.state`` with whole parameters for keys; what is set or removed here is set or removed there, too.

    A rank that has no part of a parameter ignores what is set for it. ``before_change`` is called before each change,
    and may refuse it.

    Raises:
        ConfigurationError: a state is set that has tensors of another shape than this rank's part.
    """

    def __init__(self, optimizer: Optimizer, shards: Mapping[int, Shard], before_change: Callable[[], None]) -> None:
        inner = optimizer.state
        held = {s.parameter: inner[s.own] for s in shards.values() if s.own is not None and s.own in inner}
        beside = {key: value for key, value in inner.items() if not isinstance(key, Tensor)}
        super().__init__(dict, {**held, **beside})
        self._inner, self._shards, self._before_change = inner, shards, before_change

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        shard = self._shards.get(id(key))
        if shard is not None:
            self._check_shapes(shard, value)
        self._before_change()
        super().__setitem__(key, value)
        if shard is None:
            self._inner[key] = value
        elif shard.own is not None:
            self._inner[shard.own] = value

    def __delitem__(self, key: Any) -> None:
        self._before_change()
        super().__delitem__(key)
        shard = self._shards.get(id(key))
        inner_key: Any = key if shard is None else shard.own
        self._inner.pop(inner_key, None)

    def clear(self) -> None:
        """Remove all of this rank's state; the next step makes it anew, as after construction."""
        self._before_change()
        super().clear()
        self._inner.clear()

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Remove the state of ``key``, and return it. A rank that holds none returns ``{}``, or ``default``."""
        if key not in self:
            if default is not _MISSING:
                return default
            if id(key) in self._shards:
                return {}
            raise KeyError(key)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        """Remove the last state, and return its key and it."""
        key = next(reversed(self), _MISSING)
        if key is _MISSING:
            raise KeyError("the state is empty")
        return key, self.pop(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``, after setting it if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **values: Any) -> None:
        """Set the state of several keys."""
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Let ``state`` be all that there is."""
        given = dict(state)
        for key, value in given.items():
            if id(key) in self._shards:
                self._check_shapes(self._shards[id(key)], value)
        self.clear()
        self.update(given)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def _check_shapes(self, shard: Shard, state: Any) -> None:
        if shard.own is None or not isinstance(state, Mapping):
            return
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            if value.shape != shard.own.shape:
                raise ConfigurationError(
                    f"zero.state of {shard.name} is set with {key!r} of shape {tuple(value.shape)}, but this rank's "
                    f"part of the parameter has shape {tuple(shard.own.shape)}: set {{}} to reset the state, or pass "
                    "the whole state to zero.load_state_dict()"
                )
