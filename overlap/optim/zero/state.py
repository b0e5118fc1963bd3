"""The state of this rank's chunks, as the training loop sees it, and which state can be divided at all.

[Note: state by structure]

Each rank's optimizer makes the state of its chunks. How a value of that state belongs to its parameter follows from its
shape alone: a tensor of the chunk's shape has one value per element, so the ranks' tensors are parts of one. A
0-dimensional tensor, a number or any other value without larger tensors is one per parameter, and the same on all
ranks. Anything else depends on how the parameter was cut (a scale per block, a factor per row) and is refused by name.

Where a rank holds the whole parameter (``partition="parameter"``) there is nothing to put together, and its state may
be anything. A parameter without dimensions has one element and is never cut, since its two kinds of state look alike.
State under keys that are not parameters, and entries of ``state_dict()`` beside state and groups, are the same on all
ranks.

[Note: surgery on the state]

A loop that edits moments of a parameter must get the result of plain DDP, or an error. By parameter the owner has the
whole tensors, and the other ranks nothing to edit. By element a rank has a flat part, on which ``moment[row] = 0``, a
mask or a norm would mean something else. So parts are shown as :class:`PartOfState`, which takes operators that treat
each element alike, with numbers, and refuses the rest; and no other tensor is set in place of one.
"""

from __future__ import annotations

import math
import re
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.zero.shards import Shard

_REMEDY = (
    "use ZeroRedundancyOptimizer(..., partition='parameter') and edit it `if param in zero.state`; or call "
    "zero.consolidate_state_dict(to=None), edit state = zero.state_dict(), and zero.load_state_dict(state)"
)
# Operators with numbers, and those that tell or change no value, without underscores.
_ELEMENTWISE = re.compile(
    "_*(abs|i?add|clamp|i?(true)?div|fill|[ir]?mul|nan_to_num|neg|i?sub|zero|clone|cpu|cuda|data|detach|device|"
    "dim|dtype|element_size|get_device|is_cuda|is_sparse|is_complex|is_floating_point|layout|ndim|reduce_ex|repr|"
    "requires_grad|to)_*"
)


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def is_per_element(value: Any, shape: Sequence[int]) -> bool:
    """Whether ``value`` has one value for every element of a chunk, or of a parameter, of this shape."""
    return type(value) in (Tensor, torch.nn.Parameter) and tuple(value.shape) == tuple(shape)


def check_divisible(optimizer: Optimizer, shard: Shard, state: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Raises: UnsupportedError: a value of a cut parameter's ``state`` is neither one per element nor one per
    parameter. See [Note: state by structure]."""
    for key, value in () if shard.is_whole else state.items():
        if is_per_element(value, shape) or not any(tensor.dim() for tensor in tensors_in(value)):
            continue
        kind = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            kind += f" of shape {tuple(value.shape)} {value.dtype}"
        raise UnsupportedError(
            f"{type(optimizer).__name__}: state {key!r} of {shard.name} is {kind} for {math.prod(shape)} elements of "
            f"shape {tuple(shape)}: neither one value per element (of that shape) nor one per parameter (a number, or "
            "a tensor without dimensions), so it cannot be divided by element; use ZeroRedundancyOptimizer(..., "
            "partition='parameter')"
        )


class PartOfState(Tensor):
    """This rank's part of a value per element, flat. See [Note: surgery on the state].

    Raises:
        UnsupportedError: an operator does not treat each element by itself, or takes another tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = getattr(func.__self__ if func.__name__ == "__get__" else func, "__name__", "")
        others = tensors_in([*args[1:], *(kwargs or {}).values()])
        if not _ELEMENTWISE.fullmatch(name) or any(map(Tensor.dim, others)):
            raise UnsupportedError(
                f"{name}() of a value in zero.state would not be that of plain DDP: this rank has a flat part of it, "
                f"which takes operators that treat each element alike, with numbers; {_REMEDY}"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


class _StateOfPart(UserDict[Any, Any]):
    """The state ``inner`` of the chunk of a parameter that is cut."""

    def __init__(self, inner: dict[Any, Any], shard: Shard, before_change: Callable[[], None]) -> None:
        self.data, self._shard, self._before_change = inner, shard, before_change

    def __getitem__(self, key: Any) -> Any:
        value, own = self.data[key], self._shard.own
        assert own is not None, "each rank has a chunk of a parameter that is cut"
        return value.as_subclass(PartOfState) if is_per_element(value, own.shape) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim():
            given, there = value.as_subclass(Tensor), self.data.get(key)
            # `state[key] *= 2` sets the tensor that it has changed.
            if not isinstance(there, Tensor) or given.data_ptr() != there.data_ptr():
                raise ConfigurationError(
                    f"zero.state of {self._shard.name} is set with {key!r} of shape {tuple(given.shape)}, and each "
                    "rank has its flat part of the parameter's state: change the part in place, as by .mul_(0.5) or "
                    f".zero_(); or set {{}} to reset the state; or {_REMEDY}"
                )
            value = there
        self._before_change()
        self.data[key] = value

    def __delitem__(self, key: Any) -> None:
        self._before_change()
        del self.data[key]


class StateView(MutableMapping[Any, Any]):
    """``optimizer.state`` with whole parameters for keys. It acts on the state: an entry that is set or removed here is
    set or removed there, and one for a parameter that this rank has no part of is ignored. See [Note: surgery on the
    state].

    Args:
        inner: the state of this rank's chunks.
        shards: by ``id`` of the whole parameter.
        before_use: called before tensors are handed out, which may be changed in place.
        before_change: called before entries change.
    """

    def __init__(
        self,
        inner: MutableMapping[Any, Any],
        shards: Mapping[int, Shard],
        before_use: Callable[[], None],
        before_change: Callable[[], None],
    ) -> None:
        self._inner, self._shards = inner, shards
        self._before_use, self._before_change = before_use, before_change

    def _inner_key(self, key: Any) -> Any:
        """The key of the state itself; ``None`` for a parameter that this rank has no part of."""
        shard = self._shards.get(id(key))
        return key if shard is None else shard.own

    def __iter__(self) -> Iterator[Any]:
        parameter_of = {id(shard.own): shard.parameter for shard in self._shards.values() if shard.own is not None}
        return iter([parameter_of.get(id(key), key) for key in self._inner])

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, key: object) -> bool:
        return self._inner_key(key) in self._inner

    def __getitem__(self, key: Any) -> Any:
        if (inner_key := self._inner_key(key)) is None:
            raise KeyError("another rank has the state of this parameter; look `if param in zero.state`")
        if inner_key not in self._inner:
            self[key] = {}
        self._before_use()
        state, shard = self._inner[inner_key], self._shards.get(id(key))
        return state if shard is None or shard.is_whole else _StateOfPart(state, shard, self._before_change)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``, or ``default``."""
        return self.__getitem__(key) if key in self else default

    def __setitem__(self, key: Any, value: Any) -> None:
        self._before_change()
        shard = self._shards.get(id(key))
        if shard is not None and not shard.is_whole:
            given, value = value, {}
            _StateOfPart(value, shard, self._before_change).update(given)
        if (inner_key := self._inner_key(key)) is not None:
            self._inner[inner_key] = value

    def __delitem__(self, key: Any) -> None:
        self._before_change()
        if self._inner.pop(self._inner_key(key), None) is None and id(key) not in self._shards:
            raise KeyError(key)

    def clear(self) -> None:
        """Remove all of this rank's state; the next step makes it anew, as after construction."""
        self._before_change()
        self._inner.clear()

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return defaultdict, (dict, {key: dict(state) for key, state in self.items()})
