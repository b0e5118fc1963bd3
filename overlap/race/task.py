"""What is trained: a model, its data, its optimizer, and what is measured on data that it was not trained on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from overlap.race.contestants import OptimizerKind

__all__ = ["METRICS", "Metric", "Task", "digest"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What decides the race."""

    name: str
    # As on the axis of a picture.
    label: str
    higher_is_better: bool

    def reaches(self, value: float | None, target: float) -> bool:
        """Whether ``value`` is at least as good as ``target``; ``None``, for what was not finite, never is."""
        if value is None or math.isnan(value):
            return False
        return value >= target if self.higher_is_better else value <= target


_ACCURACY = Metric(name="accuracy", label="accuracy on the test split", higher_is_better=True)
_LOSS = Metric(name="loss", label="loss on held-out text (nats a byte)", higher_is_better=False)
# By the task's name: a table of stored results needs no data.
METRICS = {"digits": _ACCURACY, "cifar": _ACCURACY, "text": _LOSS}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its data, loaded."""

    # What was read, with what tells it from other data of the kind.
    data: str
    # In words, for the title of a table.
    model: str
    make_model: Callable[[], nn.Module]
    # The batches of a rank, without end: ``batches(seed, rank, ranks)``.
    batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
    # The metric of a model in evaluation mode.
    evaluate: Callable[[nn.Module], float]
    # The learning rate is the highest of the schedule.
    optimizer: OptimizerKind


def digest(data: bytes) -> str:
    """Twelve digits that tell ``data`` from other data."""
    return hashlib.sha256(data).hexdigest()[:12]
