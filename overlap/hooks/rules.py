"""Which parameters a rule means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from overlap._checks import check_whole_number

__all__ = ["Rule", "by_ndim", "matches", "shown_rule"]

Rule = str | Callable[[str, Tensor], bool]
"""A pattern of names, or a function of a parameter's name and the parameter."""


@dataclass(frozen=True, kw_only=True)
class _ByNdim:
    least: int
    most: int | None

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return self.least <= parameter.ndim <= (math.inf if self.most is None else self.most)

    def __repr__(self) -> str:
        return f"by_ndim(least={self.least}{'' if self.most is None else f', most={self.most}'})"


def by_ndim(*, least: int = 0, most: int | None = None) -> Callable[[str, Tensor], bool]:
    """A rule of :func:`route`: parameters of ``least`` to ``most`` dimensions; of any number where ``most`` is None.

    Raises:
        ConfigurationError: ``least`` or ``most`` is not a whole number, or ``most`` is below ``least``.

    >>> by_ndim(least=2)
    by_ndim(least=2)
    """
    check_whole_number("least", least, least=0)
    if most is not None:
        check_whole_number("most", most, least=least)
    return _ByNdim(least=least, most=most)


def matches(rule: Rule, name: str, parameter: Tensor) -> bool:
    """Whether ``rule`` means the parameter of this name."""
    if not isinstance(rule, str):
        return bool(rule(name, parameter))
    return fnmatchcase(name, rule) or (rule.startswith("*.") and fnmatchcase(name, rule[2:]))


def shown_rule(rule: Rule) -> str:
    """The same text on every rank."""
    if isinstance(rule, str | _ByNdim):
        return repr(rule)
    name: str = getattr(rule, "__name__", None) or type(rule).__name__
    return name
