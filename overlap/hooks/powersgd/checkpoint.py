"""PowerSGD's memory as tensors and plain values, and its redistribution to another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError

__all__ = ["Snapshot", "State", "redistribute", "within_range"]

State = dict[str, Any]
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that one rank remembers."""

    residuals: Mapping[str, Tensor]
    factors: Mapping[str, Tensor]
    bucket_factors: Mapping[str, Tensor]
    is_left: bool
    steps: int
    numel: tuple[int, int]
    """Elements before and after compression."""
    saved_by: tuple[int, int] | None
    """Rank and number of ranks."""
    buckets: list[list[str]] | None = None
    """The buckets of the last pass, in which a run that resumes reduces its first one."""
    generator: Tensor | None = None
    """State of the generator that rounds stochastically."""
    velocities: Mapping[str, Tensor] = field(default_factory=dict)

    def pack(self) -> State:
        """Tensors and plain values, which later steps do not change."""
        rank, ranks = self.saved_by if self.saved_by is not None else (None, None)
        return {
            "version": _VERSION,
            "rank": rank,
            "ranks": ranks,
            "steps": self.steps,
            "residuals": _cloned(self.residuals),
            "factors": _cloned(self.factors),
            "bucket_factors": _cloned(self.bucket_factors),
            "is_left": self.is_left,
            "numel": list(self.numel),
            "buckets": self.buckets,
            "velocities": _cloned(self.velocities),
            "generator": None if self.generator is None else self.generator.clone(),
        }

    @classmethod
    def unpack(cls, state: Mapping[str, Any]) -> Snapshot:
        """Check the form of a state and copy its tensors.

        Raises:
            ConfigurationError: it is not a state of PowerSGD.
        """
        if not isinstance(state, Mapping) or {*state, *_LATER_KEYS} != _KEYS or state["version"] != _VERSION:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigurationError(f"this is not a state of PowerSGD (version {_VERSION}): {found}")
        rank, ranks = state["rank"], state["ranks"]
        return cls(
            residuals=_cloned(state["residuals"]),
            factors=_cloned(state["factors"]),
            bucket_factors=_cloned(state["bucket_factors"]),
            is_left=bool(state["is_left"]),
            steps=int(state["steps"]),
            numel=(int(state["numel"][0]), int(state["numel"][1])),
            saved_by=None if rank is None or ranks is None else (int(rank), int(ranks)),
            buckets=state.get("buckets"),
            generator=state.get("generator"),
            velocities=_cloned(state.get("velocities", {})),
        )


_KEYS = {one.name for one in fields(Snapshot)} - {"saved_by"} | {"version", "rank", "ranks"}
# Which older states do not have.
_LATER_KEYS = {"buckets", "generator", "velocities"}


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> State:
    """The state of ``rank`` of ``ranks``, from the states of another number of ranks.

    What compression has left out so far is still to come in the mean over ranks: the residuals' sum divided by their
    number. That stays the same: new rank ``r`` gets the sum of those of the old ranks ``r``, ``r + ranks``,
    ``r + 2 * ranks`` and so on, times new ranks over old ranks, or none. All else is the same on all ranks.

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
    snapshots = [Snapshot.unpack(state) for state in states]
    owners = [one.saved_by for one in snapshots if one.saved_by is not None]
    if len(owners) < len(snapshots):
        raise ConfigurationError("a state does not say its rank: it was saved before its PowerSGD was registered")
    first, (first_rank, old_ranks) = snapshots[0], owners[0]
    for one, (old, size) in zip(snapshots, owners, strict=True):
        if (size, one.steps) != (old_ranks, first.steps):
            raise ConfigurationError(
                f"states of different runs or steps: rank {old} of {size} after {one.steps} steps beside rank "
                f"{first_rank} of {old_ranks} after {first.steps}"
            )
    by_rank = {old: one for one, (old, _) in zip(snapshots, owners, strict=True)}
    needed = range(rank, old_ranks, ranks)
    if missing := [old for old in needed if old not in by_rank]:
        raise ConfigurationError(
            f"rank {rank} of {ranks} needs the states of the old ranks {list(needed)}; {missing} are missing"
        )
    times = ranks / old_ranks
    residuals = _summed((by_rank[old].residuals for old in needed), times=times)
    velocities = _summed((by_rank[old].velocities for old in needed), times=times)
    # Ranks that rounded by one generator would make the same errors.
    return replace(first, residuals=residuals, velocities=velocities, saved_by=(rank, ranks), generator=None).pack()


def _summed(residuals: Iterable[Mapping[str, Tensor]], *, times: float) -> dict[str, Tensor]:
    """The sum of residuals by name, ``times`` a number, rounded once to their dtype."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for each in residuals:
        for key, residual in each.items():
            wide = residual.to(torch.promote_types(residual.dtype, torch.float32))
            sums[key] = sums[key] + wide if key in sums else wide
            dtypes[key] = residual.dtype
    return {key: within_range(total * times, dtypes[key]).to(dtypes[key]) for key, total in sums.items()}


def within_range(residual: Tensor, dtype: torch.dtype) -> Tensor:
    """``residual``, limited to what ``dtype`` holds if that is ``float16``: infinity would stay for ever."""
    if dtype != torch.float16:
        return residual
    limit = torch.finfo(torch.float16).max
    return residual.clamp(-limit, limit)
