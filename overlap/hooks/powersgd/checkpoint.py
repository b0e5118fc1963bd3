"""PowerSGD's memory as tensors and plain values, and its redistribution to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overlap.errors import ConfigurationError

__all__ = ["Loaded", "State", "pack", "redistribute", "unpack"]

State = dict[str, Any]
_VERSION = 1
_KEYS = {
    "version",
    "rank",
    "ranks",
    "steps",
    "residuals",
    "factors",
    "bucket_factors",
    "is_left",
    "bypassed",
    "numel",
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A state, checked, with tensors of its own."""

    residuals: dict[str, Tensor]
    factors: dict[str, Tensor]
    bucket_factors: dict[str, Tensor]
    is_left: bool
    steps: int
    bypassed: frozenset[str] | None
    numel: tuple[int, int]
    saved_by: tuple[int, int] | None


def pack(
    *,
    residuals: Mapping[str, Tensor],
    factors: Mapping[str, Tensor],
    bucket_factors: Mapping[str, Tensor],
    is_left: bool,
    steps: int,
    bypassed: frozenset[str] | None,
    numel: tuple[int, int],
    saved_by: tuple[int, int] | None,
) -> State:
    """The state of one rank, a snapshot that later steps do not change."""
    rank, ranks = saved_by if saved_by is not None else (None, None)
    return {
        "version": _VERSION,
        "rank": rank,
        "ranks": ranks,
        "steps": steps,
        "residuals": {key: residual.clone() for key, residual in residuals.items()},
        "factors": {key: factor.clone() for key, factor in factors.items()},
        "bucket_factors": {key: factor.clone() for key, factor in bucket_factors.items()},
        "is_left": is_left,
        "bypassed": None if bypassed is None else sorted(bypassed),
        "numel": list(numel),
    }


def unpack(state: Mapping[str, Any]) -> Loaded:
    """Check the form of a state and copy its tensors.

    Raises:
        ConfigurationError: it is not a state of PowerSGD.
    """
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != _VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(f"this is not a state of PowerSGD (version {_VERSION}): {found}")
    rank, ranks = state["rank"], state["ranks"]
    return Loaded(
        residuals={key: residual.clone() for key, residual in state["residuals"].items()},
        factors={key: factor.clone() for key, factor in state["factors"].items()},
        bucket_factors={key: factor.clone() for key, factor in state["bucket_factors"].items()},
        is_left=bool(state["is_left"]),
        steps=int(state["steps"]),
        bypassed=None if state["bypassed"] is None else frozenset(state["bypassed"]),
        numel=(int(state["numel"][0]), int(state["numel"][1])),
        saved_by=None if rank is None or ranks is None else (int(rank), int(ranks)),
    )


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> State:
    """The state of ``rank`` of ``ranks``, from the states of another number of ranks.

    Only the sum of residuals over ranks matters to what is learned, and that stays the same: new rank ``r`` gets the
    sum of those of the old ranks ``r``, ``r + ranks``, ``r + 2 * ranks`` and so on, or none. All else is the same on
    all ranks.

    Args:
        states: of the old ranks, all of them or at least those named above (any one of them if there is none).
        rank: this rank in the new group.
        ranks: size of the new group.

    Raises:
        ConfigurationError: a state that is needed is missing, or states do not belong together.
    """
    if not 0 <= rank < ranks:
        raise ConfigurationError(f"rank={rank} is out of range for ranks={ranks}: it is 0 to {ranks - 1}")
    if not states:
        raise ConfigurationError("states is empty: give the states that the old ranks saved")
    loaded = [unpack(state) for state in states]
    if any(one.saved_by is None for one in loaded):
        raise ConfigurationError("a state does not say its rank: it was saved before its PowerSGD was registered")
    by_rank = {one.saved_by[0]: one for one in loaded if one.saved_by is not None}
    first = loaded[0]
    assert first.saved_by is not None
    old_ranks = first.saved_by[1]
    for one in loaded:
        assert one.saved_by is not None
        if (one.saved_by[1], one.steps) != (old_ranks, first.steps):
            raise ConfigurationError(
                f"states of different runs or steps: rank {one.saved_by[0]} of {one.saved_by[1]} after "
                f"{one.steps} steps beside rank {first.saved_by[0]} of {old_ranks} after {first.steps}"
            )
    needed = range(rank, old_ranks, ranks)
    if missing := [old for old in needed if old not in by_rank]:
        raise ConfigurationError(
            f"rank {rank} of {ranks} needs the states of the old ranks {list(needed)}; {missing} are missing"
        )
    residuals: dict[str, Tensor] = {}
    for old in needed:
        for key, residual in by_rank[old].residuals.items():
            residuals[key] = residuals[key].add_(residual) if key in residuals else residual
    return pack(
        residuals=residuals,
        factors=first.factors,
        bucket_factors=first.bucket_factors,
        is_left=first.is_left,
        steps=first.steps,
        bypassed=first.bypassed,
        numel=first.numel,
        saved_by=(rank, ranks),
    )
