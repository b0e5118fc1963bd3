"""The error feedback of one number of ranks for another number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from overlap.errors import ConfigurationError

__all__ = ["redistribute"]


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state of ``rank`` of ``ranks``, from the states of another number of ranks.

    Errors are parts of the mean, so their sum over ranks is what is still to be delivered, and it stays the same: new
    rank ``r`` gets the sum of those of the old ranks ``r``, ``r + ranks`` and so on, or none. Generators start anew.
    What all ranks remember alike stays.

    Args:
        states: of all old ranks, in any order.
        rank: this rank in the new group.
        ranks: size of the new group.

    Raises:
        ConfigurationError: ``rank`` is out of range, a state is missing, or states do not belong together.
    """
    if not 0 <= rank < ranks:
        raise ConfigurationError(f"rank={rank} is out of range for ranks={ranks}: it is 0 to {ranks - 1}")
    if any(not {"rank", "ranks"} <= set(state) for state in states):
        raise ConfigurationError("a state does not say its rank: it was saved before the first pass of its stage")
    by_rank = {state["rank"]: state for state in states}
    sizes = sorted({state["ranks"] for state in states})
    if len(sizes) != 1 or len(by_rank) != len(states) or sorted(by_rank) != list(range(sizes[0])):
        raise ConfigurationError(
            f"redistribute needs the state of every old rank once, but was given ranks {sorted(by_rank)} of {sizes}"
        )
    errors: dict[str, Tensor] = {}
    for old in range(rank, sizes[0], ranks):
        for name, error in by_rank[old].get("error", {}).items():
            errors[name] = errors[name].add_(error) if name in errors else error.clone()
    alike = {key: value for key, value in by_rank[0].items() if key not in ("error", "generator")}
    return {**alike, "error": errors, "rank": rank, "ranks": ranks}
