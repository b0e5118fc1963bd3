"""Whether all ranks register the same stages for the same model, and which of several updates has which parameters.

[Note: models of one layout]

What ranks compare where they register says nothing of two models that differ only in their values: a generator's two
copies, say. DDP has made these equal on all ranks, so values tell one model from another. They may differ between ranks
all the same, under local SGD for one, and that is no mistake. So it is an error only where a rank registers what rank 0
registered at another place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from overlap._torch.fingerprint import fingerprint
from overlap.errors import ConfigurationError
from overlap.hooks.context import StageContext
from overlap.hooks.stage import Role, Stage

__all__ = ["Division", "description", "difference"]


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


class _Registered(NamedTuple):
    layout: str
    fingerprints: Sequence[str]
    """Of each rank."""


_registered: WeakKeyDictionary[dist.ProcessGroup, list[_Registered]] = WeakKeyDictionary()


def description(stage: Stage, context: StageContext, division: Division) -> list[str]:
    """The text that must be the same on every rank, and a fingerprint of the parameters; for :func:`difference`."""
    signature = f"{stage.signature} for {context.model_in_words}{division.signature}"
    return [signature, fingerprint(context.names or ())]


def difference(described: Sequence[Sequence[str]], context: StageContext) -> str | None:
    """How a rank's registration differs from rank 0's, as far as that can be known; the same text on every rank.

    Args:
        described: the :func:`description` of each rank.
        context: of this registration.
    """
    signatures, fingerprints = zip(*described, strict=True)
    for rank, signature in enumerate(signatures):
        if signature != signatures[0]:
            return (
                f"rank {rank} registers {signature}, but rank 0 registers {signatures[0]}; "
                "every rank must run the same stages for the same model"
            )
    if not context.names:
        return None
    layout, past = context.model_in_words, _registered.setdefault(context.group, [])
    past.append(_Registered(layout, fingerprints))
    alike = [each.fingerprints for each in past if each.layout == layout]
    for rank in range(len(fingerprints)):
        if (places := _other_place([each[rank] for each in alike], [each[0] for each in alike])) is not None:
            return (
                f"rank {rank} registers as number {places[0]} of {layout} what rank 0 registers as number {places[1]}; "
                "register models in the same order on every rank"
            )
    return None


def _other_place(own: Sequence[str], of_rank_0: Sequence[str]) -> tuple[int, int] | None:
    """The places, counted from 1, at which a rank and rank 0 have registered one model, the last of them now.

    Args:
        own: the fingerprints of what the rank has registered so far, in order.
        of_rank_0: those of rank 0.
    """
    if own[-1] == of_rank_0[-1]:
        return None
    for place, (mine, theirs) in enumerate(zip(own[:-1], of_rank_0[:-1], strict=True), start=1):
        if mine != theirs and theirs == own[-1]:
            return len(own), place
        if mine != theirs and mine == of_rank_0[-1]:
            return place, len(own)
    return None
