"""Which parameter groups an optimizer may treat otherwise than others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["LARGE_FROM", "kinds_of", "one_of_each_kind"]

# Small parameters keep one state in some optimizers, and large ones, from this number of elements on, another one.
LARGE_FROM = 4096
# More values than this of a text are names of groups, and not a choice among algorithms.
_MOST_TEXTS = 4

Group = Mapping[str, Any]


def one_of_each_kind(groups: Sequence[Group]) -> list[Group]:
    """The first and the last of ``groups``, and in between those that show a kind of options or parameters first.

    Options are alike if they have the same keys and types, switches are set alike, and the same numbers are zero;
    parameters if they agree in dtype, device, number of dimensions, and in whether they are large.
    """
    texts = _choices(groups)
    seen = set(_kinds(groups[-1], texts)) if groups else set()
    chosen = []
    for place, group in enumerate(groups):
        kinds = set(_kinds(group, texts))
        if place in (0, len(groups) - 1) or not kinds <= seen:
            chosen.append(group)
            seen |= kinds
    return chosen


def kinds_of(groups: Sequence[Group]) -> Hashable:
    """Equal for groups of which the same can be learned."""
    texts = _choices(groups)
    return min(len(groups), 2), frozenset(kind for group in groups for kind in _kinds(group, texts))


def _kinds(group: Group, texts: frozenset[str]) -> Iterable[Hashable]:
    yield frozenset((key, *_kind_of(value, key in texts)) for key, value in group.items() if key != "params")
    for parameter in group["params"]:
        numel, dims = parameter.numel(), parameter.dim()
        yield parameter.dtype, parameter.device, dims, numel >= LARGE_FROM, numel == 0, parameter.requires_grad


def _kind_of(value: object, is_choice: bool) -> tuple[Hashable, ...]:
    if isinstance(value, (bool, int, float)):
        return type(value).__name__, bool(value)
    return (type(value).__name__, value) if isinstance(value, str) and is_choice else (type(value).__name__,)


def _choices(groups: Sequence[Group]) -> frozenset[str]:
    """The keys of texts that choose among algorithms."""
    texts: dict[str, set[str]] = {}
    for group in groups:
        for key, value in group.items():
            if isinstance(value, str):
                texts.setdefault(key, set()).add(value)
    return frozenset(key for key, values in texts.items() if len(values) <= _MOST_TEXTS)
