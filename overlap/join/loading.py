"""The batches of a loader, each of which begins an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.iterations import Iterations, Phase
from overlap.join.participation import KnownParticipation, PolledParticipation

__all__ = ["batches"]

_Batch = TypeVar("_Batch")

# Any: where a loader has run out it stands for a batch.
_NONE: Any = object()


def batches(iterations: Iterations, loader: Iterable[_Batch], samples: bool | Callable[[Any], int]) -> Iterator[_Batch]:
    """The batches of ``loader``; ends where this rank runs out, or with ``on_exhausted="stop"`` where any does."""
    participation = iterations.begin_loader(_length(loader))
    if isinstance(participation, KnownParticipation):
        yield from _known(iterations, participation, loader)
    else:
        yield from _ahead(iterations, participation, loader, samples)
    iterations.phase = Phase.EXHAUSTED


def _known(iterations: Iterations, participation: KnownParticipation, loader: Iterable[_Batch]) -> Iterator[_Batch]:
    rank, said = iterations.rank, participation.lengths[iterations.rank]
    stops = iterations.options.on_exhausted == "stop"
    upcoming = iter(loader)
    for number in range(min(participation.lengths) if stops else said):
        batch = next(upcoming, _NONE)
        if batch is _NONE:
            raise TrainingLoopError(f"the loader of rank {rank} has {number} batches, but it said {said}")
        iterations.begin_known(participation)
        yield batch
    if not stops and next(upcoming, _NONE) is not _NONE:
        raise TrainingLoopError(f"the loader of rank {rank} has more than the {said} batches that it said")


def _ahead(
    iterations: Iterations,
    participation: PolledParticipation,
    loader: Iterable[_Batch],
    samples: bool | Callable[[Any], int],
) -> Iterator[_Batch]:
    stops = iterations.options.on_exhausted == "stop"
    batches = iter(loader)
    upcoming = next(batches, _NONE)
    participation.announce(_samples(upcoming, samples))
    while True:
        iterations.begin_announced(participation)
        if upcoming is _NONE or (participation.missing and stops):
            return
        batch, upcoming = upcoming, next(batches, _NONE)
        participation.announce(_samples(upcoming, samples))
        iterations.current += 1
        yield batch


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None  # A generator, or a loader over an iterable dataset.


def _samples(batch: Any, samples: bool | Callable[[Any], int]) -> int:
    if batch is _NONE:
        return 0
    if not samples:
        return 1
    number = _first_dimension(batch) if isinstance(samples, bool) else samples(batch)
    if number is None or isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(
            f"weight_by_samples found {number!r} samples in a batch; give a callable of a batch that returns its "
            "size, 1 or more"
        )
    return number


def _first_dimension(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((number for part in parts if (number := _first_dimension(part)) is not None), None)
