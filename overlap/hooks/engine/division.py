"""Which of several updates has which parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks.stage import Role, Stage

__all__ = ["Division"]


@dataclass(frozen=True)
class Division:
    """The parameters of each update of a chain, and those that none has, which keep their averaged ``.grad``."""

    shares: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The text of each update and the names of its parameters."""
    rest: tuple[str, ...] = ()

    @staticmethod
    def of(stages: Sequence[Stage], names: Mapping[Tensor, str] | None) -> Division:
        """How ``stages`` divide the parameters of a model, by name.

        Raises:
            ConfigurationError: two updates have a parameter in common.
        """
        updates = [stage for stage in stages if stage.role is Role.UPDATE]
        holders: dict[int, Stage] = {}
        shares = []
        for update in updates:
            mine = [parameter for parameter in update.updated if names is None or parameter in names]
            for parameter in mine:
                if (other := holders.setdefault(id(parameter), update)) is not update:
                    raise ConfigurationError(
                        f"{_name(parameter, names)} is a parameter of both {other!r} and {update!r}, which would both "
                        "update it: give each optimizer parameters of its own"
                    )
            shares.append((repr(update), tuple(_name(parameter, names) for parameter in mine)))
        rest = [name for parameter, name in (names or {}).items() if id(parameter) not in holders] if updates else []
        return Division(tuple(shares), tuple(rest))

    @property
    def is_of_several(self) -> bool:
        """Whether there is more than one update."""
        return len(self.shares) > 1

    @property
    def signature(self) -> str:
        """What must be the same on every rank, as text."""
        if not str(self):
            return ""
        return f"{self} ({hashlib.sha256(repr((self.shares, self.rest)).encode()).hexdigest()[:8]})"

    def __str__(self) -> str:
        """The plan in words; nothing where one update has all parameters."""
        if not (self.is_of_several or self.rest):
            return ""
        shares = [f"{update} updates {_listed(names)}" for update, names in self.shares]
        return "; ".join(["", *shares, *([f"no update has {_listed(self.rest)}"] if self.rest else [])])


def _name(parameter: Tensor, names: Mapping[Tensor, str] | None) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}" if names is None else names[parameter]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{len(names)} parameters ({shown}{', ...' if len(names) > 4 else ''})" if len(names) != 1 else shown
