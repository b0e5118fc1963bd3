"""What PowerSGD remembers from pass to pass: residuals and factors by parameter name, and counters."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from overlap._torch.device import has_streams, hold
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.finite import all_finite
from overlap.hooks.stage import StageContext
from overlap.hooks.wires import RoundingGenerator, Wire

__all__ = ["Memory", "Slot", "Snapshot", "State", "Statistics", "as_matrix", "redistribute", "within_range"]

# A name that users set levels for; it is documented.
_logger = logging.getLogger("overlap.hooks.powersgd.statistics")

State = dict[str, Any]
_VERSION = 2


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
        self._numbers: Any = WeakIdKeyDictionary()
        self._context: StageContext | None = None
        self._saved_by: tuple[int, int] | None = None
        # Loaded for parameters whose gradients have not come yet.
        self._unclaimed: set[str] = set()

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
        self._numbers = WeakIdKeyDictionary()
        self._context = context

    def detach(self) -> None:
        """Stop serving the model, so that another one can be attached."""
        self._context = None

    def keys_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The names of the slots of the bucket's parameters."""
        if bucket.fqns is not None:
            return bucket.fqns
        numbers = self._numbers
        return tuple(numbers.setdefault(parameter, str(len(numbers))) for parameter in bucket.parameters)

    def slots_of(self, keys: tuple[str, ...]) -> list[Slot]:
        """The slots of parameters, made where there are none."""
        self._unclaimed.difference_update(keys)
        return [self.slots.setdefault(key, Slot(key)) for key in keys]

    def release(self, bucket: Bucket, exact: Iterable[int], keys: tuple[str, ...]) -> None:
        """Add what is kept of parameters that are not compressed to their gradients, as after
        loading a state that was saved with other options, and drop it."""
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

    def rounding(self, wire: Wire) -> RoundingGenerator:
        """The random numbers with which ``wire`` rounds, which are remembered."""
        if self._generator is None:
            self._generator = RoundingGenerator(wire)
            self._generator.load(self._generator_state)
        return self._generator

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
            factors={key: f for key, slot in self.slots.items() if (f := slot.factor_by_shape) is not None},
            bucket_factors={key: slot.factor for key, slot in self.bucket_slots.items() if slot.factor is not None},
            is_left=any(slot.is_left for slot in self.slots.values() if slot.factor is not None)
            or any(slot.is_left for slot in self.bucket_slots.values() if slot.factor is not None),
            steps=self.steps,
            numel=(self.statistics.numel_before, self.statistics.numel_after),
            saved_by=(group.rank(), group.size()) if group is not None else self._saved_by,
            generator=self._generator_state if self._generator is None else self._generator.state(),
        ).pack()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`PowerSGD.load_state_dict`."""
        loaded = Snapshot.unpack(state)
        before = self.slots, self._saved_by
        self.slots = {
            key: Slot(key, loaded.residuals.get(key), loaded.factors.get(key), loaded.is_left)
            for key in {**loaded.residuals, **loaded.factors}
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
            if slot.residual is not None and slot.residual.shape != shapes[key]:
                raise ConfigurationError(
                    f"the state's residual of parameter {key} has shape {tuple(slot.residual.shape)}, but the "
                    f"parameter has {tuple(shapes[key])}: it is the state of another model"
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


@dataclass(frozen=True)
class ColumnOrder:
    """The order of a matrix's columns, where the dimensions behind the first lie in memory otherwise than in the shape.

    So it is in formats such as ``channels_last``.
    """

    lengths: tuple[int, ...]
    """Those of the dimensions behind the first."""
    dims: tuple[int, ...]
    """Their places in ``lengths``, the outermost in memory first."""

    @classmethod
    def of(cls, gradient: Tensor) -> ColumnOrder | None:
        """That of a gradient that is a matrix as it lies in memory; ``None`` where it is that of the shape."""
        lengths, strides = tuple(gradient.shape[1:]), gradient.stride()[1:]
        dims = tuple(sorted(range(len(lengths)), key=lambda dim: -strides[dim]))
        is_by_rows = gradient.ndim > 2 and gradient.stride(0) == math.prod(lengths)
        return cls(lengths, dims) if is_by_rows and not gradient.is_contiguous() else None

    def from_shape(self, factor: Tensor) -> Tensor:
        """A factor ``(rank, columns)`` in this order."""
        parts = factor.reshape(-1, *self.lengths).permute(0, *(dim + 1 for dim in self.dims))
        return parts.reshape(factor.shape)

    def to_shape(self, factor: Tensor) -> Tensor:
        """The inverse of :meth:`from_shape`."""
        parts = factor.reshape(-1, *(self.lengths[dim] for dim in self.dims))
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return parts.permute(0, *(place + 1 for place in back)).reshape(factor.shape)


@dataclass
class Slot:
    """The memory of one parameter."""

    key: str
    residual: Tensor | None = None
    """What compression has left out of this rank's gradients; shaped and strided as the gradient."""
    factor: Tensor | None = None
    """The mean factor ``(rank, length)`` to start from, the same on every rank."""
    is_left: bool = False
    """Whether ``factor`` is a left one; where factors alternate, it is in every other step."""
    columns: ColumnOrder | None = None
    """The order of the columns of a right factor, where it is not that of the shape."""

    def arrange(self, gradient: Tensor) -> None:
        """Bring a right factor into the order in which ``gradient`` lies in memory."""
        columns = ColumnOrder.of(gradient)
        if columns != self.columns:
            self.factor = self.factor_by_shape
            if columns is not None and self.factor is not None and not self.is_left:
                self.factor = columns.from_shape(self.factor)
            self.columns = columns

    @property
    def factor_by_shape(self) -> Tensor | None:
        """The factor with columns in the order of the shape, as checkpoints have it."""
        if self.columns is None or self.factor is None or self.is_left:
            return self.factor
        return self.columns.to_shape(self.factor)

    def residual_like(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual in the layout of ``gradient``, made of zeros if there is none.

        Raises:
            ConfigurationError: the residual was loaded for a parameter of another shape.
        """
        found = self.residual
        if found is None:
            found = _empty_like(gradient, dtype).zero_()
        elif found.shape != gradient.shape:
            raise ConfigurationError(
                f"the residual of parameter {self.key} has shape {tuple(found.shape)}, but its gradient has "
                f"{tuple(gradient.shape)}: the state of another model was loaded"
            )
        elif (found.stride(), found.dtype, found.device) != (gradient.stride(), dtype, gradient.device):
            found = _empty_like(gradient, dtype).copy_(hold(found))
        self.residual = found
        return found

    def check_factor(self, factor: Tensor, length: int) -> None:
        """Raises: ConfigurationError: the directions of ``factor`` do not have ``length`` elements."""
        if factor.ndim != 2 or factor.shape[1] != length:
            raise ConfigurationError(
                f"the factor of parameter {self.key} has shape {tuple(factor.shape)}, but here its directions have "
                f"{length} elements: the state comes from another model; to go on with the residuals and new factors, "
                "load it with state['factors'] = {}"
            )


def as_matrix(gradient: Tensor) -> Tensor:
    """A view ``(rows, cols)`` of a gradient of two or more dimensions, as it lies in memory.

    In memory formats such as channels-last the columns of a row are in another order than in the shape, which is the
    same on all ranks and changes no product.
    """
    if gradient.ndim == 2:
        return gradient
    rows = gradient.shape[0]
    cols = gradient.numel() // rows
    return gradient.as_strided((rows, cols), (cols, 1))


def _empty_like(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(gradient.size(), gradient.stride(), dtype=dtype, device=gradient.device)


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
    generator: Tensor | None
    """State of the generator that rounds stochastically."""

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
            "generator": None if self.generator is None else self.generator.clone(),
        }

    @classmethod
    def unpack(cls, state: Mapping[str, Any]) -> Snapshot:
        """Check the form of a state and copy its tensors.

        Raises:
            ConfigurationError: it is not a state of PowerSGD.
        """
        if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != _VERSION:
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
            generator=state["generator"],
        )


_KEYS = {one.name for one in fields(Snapshot)} - {"saved_by"} | {"version", "rank", "ranks"}


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
    # Ranks that rounded by one generator would make the same errors.
    return replace(first, residuals=residuals, saved_by=(rank, ranks), generator=None).pack()


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
