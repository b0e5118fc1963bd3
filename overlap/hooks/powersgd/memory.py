"""What PowerSGD remembers from pass to pass: residuals and factors by parameter name, and counters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import has_streams, hold
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.cut import BucketCut, SavedCut
from overlap.hooks.finite import all_finite
from overlap.hooks.powersgd.checkpoint import Snapshot, State
from overlap.hooks.powersgd.slot import Slot
from overlap.hooks.powersgd.wired import WiredMean
from overlap.hooks.stage import StageContext
from overlap.hooks.wires import RoundingGenerator, Wire

__all__ = ["Memory", "Statistics"]

# A name that users set levels for; it is documented.
_logger = logging.getLogger("overlap.hooks.powersgd.statistics")


@dataclass
class Statistics:
    """Counts elements before and after compression, over all buckets of all compressed steps."""

    numel_before: int = 0
    numel_after: int = 0
    _next_report: int | None = None

    def count(self, before: int, after: int) -> None:
        """A bucket of ``before`` elements was sent as ``after``."""
        self.numel_before += before
        self.numel_after += after

    def summary(self) -> tuple[float, int, int]:
        """How many times fewer elements were sent (0 before anything was sent), those before and after."""
        rate = self.numel_before / self.numel_after if self.numel_after > 0 else 0.0
        return rate, self.numel_before, self.numel_after

    def report(self, step: int, every_steps: int) -> None:
        """Log a line when it is due."""
        if self._next_report is None:
            self._next_report = step
        if step < self._next_report:
            return
        self._next_report = step + every_steps
        rate, before, after = self.summary()
        _logger.info("PowerSGD after step %d: %d elements sent as %d, %.1f times fewer", step, before, after, rate)


@dataclass
class Memory:
    """The slots of a model's parameters, by name, and the counters that go with them.

    The name is the fully qualified one. Where only a hook is registered, names are not known; parameters are then
    numbered in the order in which their gradients first come, which depends on the model alone.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    # Where a whole bucket is one matrix, its factor belongs to several parameters.
    bucket_slots: dict[str, Slot] = field(default_factory=dict)
    steps: int = 0
    """Backward passes begun."""
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self._generator: RoundingGenerator | None = None
        # As it was loaded.
        self._generator_state: Tensor | None = None
        self._numbering = BucketCut()
        self._context: StageContext | None = None
        self._saved_by: tuple[int, int] | None = None
        # Loaded for parameters whose gradients have not come yet.
        self._unclaimed: set[str] = set()
        self._cut = SavedCut()

    def attach(self, context: StageContext) -> None:
        """Serve the model of ``context``; numbering starts anew.

        Raises:
            ConfigurationError: it serves another model already, or what was loaded does not fit this one.
        """
        if self._context is not None and self._context.names is not None:
            raise ConfigurationError(
                "this PowerSGD is registered already, and its memory serves one model: "
                "remove() that registration first, or make one PowerSGD for each model"
            )
        self._check(context)
        self._numbering = context.cut or BucketCut()
        self._context = context
        self._cut.attach(context.cut)

    def detach(self) -> None:
        """Stop serving the model, so that another one can be attached."""
        self._context = None
        self._cut.detach()

    def keys_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The names of the slots of the bucket's parameters."""
        return self._numbering.keys_of(bucket)

    def slots_of(self, keys: tuple[str, ...]) -> list[Slot]:
        """The slots of parameters, made where there are none."""
        self._unclaimed.difference_update(keys)
        return [self.slots.setdefault(key, Slot(key)) for key in keys]

    def release(self, bucket: Bucket, exact: Iterable[int], keys: tuple[str, ...]) -> None:
        """Add what is kept of parameters that are no longer compressed to their gradients, and drop it."""
        slots = self.slots_of(keys)
        for place in exact:
            if (residual := slots[place].residual) is not None:
                bucket.gradients[place].add_(hold(residual))
            slots[place].factor = None

    def settle_released(self, bucket: Bucket, exact: Iterable[int], keys: tuple[str, ...]) -> None:
        """Drop what :meth:`release` added, where the outcome, the same on all ranks, is finite."""
        slots = self.slots_of(keys)
        for place in exact:
            if (residual := slots[place].residual) is None:
                continue
            is_finite = all_finite(bucket.gradients[place])
            if not has_streams(is_finite.device):
                slots[place].residual = None if bool(is_finite) else residual
            else:
                slots[place].residual = torch.where(is_finite, torch.zeros_like(residual), hold(residual))

    def wired_mean(self, wire: Wire | None) -> WiredMean | None:
        """The mean by ``wire``, whose random numbers, if it rounds with such, are remembered."""
        if wire is None:
            return None
        if self._generator is None:
            self._generator = RoundingGenerator(wire)
            self._generator.load(self._generator_state)
        return WiredMean(wire, self._generator)

    def bucket_slot(self, keys: tuple[str, ...]) -> Slot:
        """The slot of a bucket that is one matrix."""
        key = f"{keys[0]} ... {keys[-1]}"
        return self.bucket_slots.setdefault(key, Slot(key))

    def forget_factors(self) -> None:
        """Let every factor start from random directions again."""
        for slot in (*self.slots.values(), *self.bucket_slots.values()):
            slot.factor = None

    def check_claimed(self) -> None:
        """Raises: ConfigurationError: a whole backward has not met all parameters that were loaded."""
        if self._unclaimed:
            raise ConfigurationError(_foreign(self._unclaimed))

    def state_dict(self) -> State:
        """See :meth:`PowerSGD.state_dict`."""
        group = None if self._context is None else self._context.group
        return Snapshot(
            residuals={key: slot.residual for key, slot in self.slots.items() if slot.residual is not None},
            velocities={key: slot.velocity for key, slot in self.slots.items() if slot.velocity is not None},
            factors={key: f for key, slot in self.slots.items() if (f := slot.factor_by_shape) is not None},
            bucket_factors={key: slot.factor for key, slot in self.bucket_slots.items() if slot.factor is not None},
            is_left=any(slot.is_left for slot in self.slots.values() if slot.factor is not None)
            or any(slot.is_left for slot in self.bucket_slots.values() if slot.factor is not None),
            steps=self.steps,
            numel=(self.statistics.numel_before, self.statistics.numel_after),
            saved_by=(group.rank(), group.size()) if group is not None else self._saved_by,
            buckets=self._cut.state(),
            generator=self._generator_state if self._generator is None else self._generator.state(),
        ).pack()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`PowerSGD.load_state_dict`."""
        loaded = Snapshot.unpack(state)
        before = self.slots, self._saved_by
        self.slots = {
            key: Slot(
                key, loaded.residuals.get(key), loaded.velocities.get(key), loaded.factors.get(key), loaded.is_left
            )
            for key in {**loaded.residuals, **loaded.velocities, **loaded.factors}
        }
        self._saved_by = loaded.saved_by
        if self._context is not None:
            try:
                self._check(self._context)
            except ConfigurationError:
                self.slots, self._saved_by = before
                raise
        self.bucket_slots = {
            key: Slot(key, factor=factor, is_left=loaded.is_left) for key, factor in loaded.bucket_factors.items()
        }
        self.steps = loaded.steps
        self.statistics = Statistics(*loaded.numel)
        self._generator, self._generator_state = None, loaded.generator
        self._unclaimed = set(self.slots)
        self._cut.load(loaded.buckets)

    def _check(self, context: StageContext) -> None:
        """Raises: ConfigurationError: what was loaded is another rank's or another model's."""
        here = context.group.rank(), context.group.size()
        if self._saved_by is not None and self._saved_by != here:
            raise ConfigurationError(
                f"the state was saved by rank {self._saved_by[0]} of {self._saved_by[1]}, but this is rank "
                f"{here[0]} of {here[1]}, and each rank has its own residuals: load this rank's file, or make "
                f"its state with PowerSGD.redistribute(states, rank={here[0]}, ranks={here[1]})"
            )
        if context.names is None:
            return
        shapes = {name: parameter.shape for parameter, name in context.names.items()}
        if foreign := set(self.slots) - set(shapes):
            raise ConfigurationError(_foreign(foreign))
        for key, slot in self.slots.items():
            for what, kept in (("residual", slot.residual), ("velocity", slot.velocity)):
                if kept is not None and kept.shape != shapes[key]:
                    raise ConfigurationError(
                        f"the state's {what} of parameter {key} has shape {tuple(kept.shape)}, but the parameter has "
                        f"{tuple(shapes[key])}: it is the state of another model"
                    )

    def __getstate__(self) -> dict[str, Any]:
        # Parameters and process groups are not pickled; pickling serves PowerSGDState.
        return {"state": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(pickled["state"])


def _foreign(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return (
        f"the state has parameters that the model does not have ({', '.join(listed[:5])}"
        f"{', ...' if len(listed) > 5 else ''}): it is the state of another model"
    )
