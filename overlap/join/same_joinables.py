"""Whether all ranks give Join the same joinables, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._checks import described
from overlap._torch.fingerprint import fingerprint

__all__ = ["difference", "told_of"]


@dataclass(frozen=True)
class _Given:
    """One joinable, as ranks tell each other of it."""

    name: str
    elements: list[int]
    """Of each parameter; none where a joinable shows no parameters."""
    values: str
    """A fingerprint, where another joinable of this rank has this name and these elements. Ranks may train apart."""


def told_of(joinables: Sequence[Any]) -> list[dict[str, Any]]:
    """What this rank tells the others of its ``joinables``; the host waits for a device only where two look alike."""
    parameters = [_parameters(joinable) for joinable in joinables]
    looks = [
        (described(joinable), [one.numel() for one in own]) for joinable, own in zip(joinables, parameters, strict=True)
    ]
    return [
        asdict(_Given(*look, fingerprint(own) if looks.count(look) > 1 else ""))
        for look, own in zip(looks, parameters, strict=True)
    ]


def difference(rank: int, told: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> str | None:
    """What ``rank`` has told otherwise than rank 0; ``None`` where nothing is known to differ.

    Numbers of elements may differ between ranks, and values, too: it is a mistake only where a joinable of rank 0 is
    given in another place.
    """
    mine, reference = [_Given(**one) for one in told], [_Given(**one) for one in first]
    names, of_first = [one.name for one in mine], [one.name for one in reference]
    if names != of_first:
        given = f"rank {rank} enters Join with [{', '.join(names)}], but rank 0 with [{', '.join(of_first)}]"
        if sorted(names) == sorted(of_first):
            return f"{given}: give them in the same order on every rank"
        return f"{given}: every rank must be given the same"
    for place, (own, other) in enumerate(zip(mine, reference, strict=True)):
        if own != other and own in reference:
            return (
                f"rank {rank} enters Join with a {own.name} in place {place} of the list that rank 0 has in place "
                f"{reference.index(own)}: give joinables in the same order on every rank"
            )
    return None


def _parameters(joinable: Any) -> list[Tensor]:
    if isinstance(joinable, LRScheduler):
        joinable = joinable.optimizer
    if isinstance(joinable, Optimizer):
        return [one for group in joinable.param_groups for one in group["params"]]
    return list(joinable.parameters()) if isinstance(joinable, nn.Module) else []
