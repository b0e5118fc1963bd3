"""What a race is asked to do: the options, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overlap.bench.link import parse_bandwidth
from overlap.errors import ConfigurationError
from overlap.race.contestants import BASELINE, contestants

__all__ = ["TASKS", "Settings", "TaskDefaults"]


@dataclass(frozen=True, kw_only=True)
class TaskDefaults:
    """What a task takes where the options say nothing; small enough for two cores and a slow link."""

    steps: int
    evaluate_every: int
    # Of all ranks together, so that every number of ranks trains alike.
    batch_size: int
    # Channels of the first stage of ResNet-18, or the width of a Transformer.
    width: int
    target: float


TASKS = {
    "digits": TaskDefaults(steps=96, evaluate_every=8, batch_size=64, width=16, target=0.95),
    "cifar": TaskDefaults(steps=4000, evaluate_every=200, batch_size=128, width=32, target=0.7),
    "text": TaskDefaults(steps=128, evaluate_every=8, batch_size=64, width=128, target=2.4),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one race, with the task's defaults filled in by :meth:`of`."""

    task: str
    # A folder with CIFAR-10, or a file of text.
    data: str | None = None
    ranks: int = 2
    # Written as `tc` does, e.g. "1gbit"; None races on loopback, unshaped.
    bandwidth: str | None = None
    # Besides plain DDP, which is always there. Empty: all.
    contestants: tuple[str, ...] = ()
    # Seeds 0 to seeds - 1, of the weights and of the order of the data.
    seeds: int = 3
    steps: int
    evaluate_every: int
    batch_size: int
    width: int

    @classmethod
    def of(cls, task: str, **given: object) -> Settings:
        """The settings with the task's defaults for whatever is None or not given."""
        if task not in TASKS:
            raise ConfigurationError(f"task={task!r} is not one of {', '.join(TASKS)}")
        default = TASKS[task]
        filled = {name: getattr(default, name) for name in ("steps", "evaluate_every", "batch_size", "width")}
        filled.update({name: value for name, value in given.items() if value is not None})
        return cls(task=task, **filled)

    def __post_init__(self) -> None:
        unknown = [name for name in self.contestants if name not in contestants()]
        if unknown:
            raise ConfigurationError(f"contestants has {', '.join(unknown)}; known are {', '.join(contestants())}")
        if self.bandwidth is not None:
            parse_bandwidth(self.bandwidth)
        if self.batch_size % self.ranks:
            raise ConfigurationError(
                f"batch_size={self.batch_size} is of all ranks together: give a multiple of ranks={self.ranks}"
            )
        # BatchNorm has nothing to normalize with less.
        if self.batch_size < 2 * self.ranks:
            raise ConfigurationError(
                f"batch_size={self.batch_size} leaves one sample a rank: give at least {2 * self.ranks}"
            )
        if self.evaluate_every > self.steps:
            raise ConfigurationError(
                f"evaluate_every={self.evaluate_every} is more than steps={self.steps}: nothing would be evaluated"
            )
        if self.task == "text" and self.width % 4:
            raise ConfigurationError(f"width={self.width} is divided among 4 heads: give a multiple of 4")
        if self.task == "digits" and self.data is not None:
            raise ConfigurationError(f"data={self.data!r} is for cifar and text: the digits come with scikit-learn")
        if self.task == "cifar" and self.data is None:
            raise ConfigurationError("task='cifar' needs --data, the folder in which cifar-10-batches-py lies")
        if self.data is not None and not Path(self.data).exists():
            raise ConfigurationError(f"data={self.data!r} does not exist")

    @property
    def names(self) -> tuple[str, ...]:
        """The contestants that take part, in the order of the table."""
        asked = {BASELINE, *(self.contestants or contestants())}
        return tuple(name for name in contestants() if name in asked)

    @property
    def entries(self) -> tuple[tuple[str, int], ...]:
        """Contestant and seed, in the order in which they train.

        All train with one seed before any does with the next, each time beginning with another, so that a change in
        the machine's load falls on all.
        """
        names = self.names
        return tuple(
            (names[(place + seed) % len(names)], seed) for seed in range(self.seeds) for place in range(len(names))
        )
