"""What PowerSGD remembers from pass to pass: residuals and factors by parameter name, and counters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

__all__ = ["Memory", "Statistics", "bucket_key", "redistribute", "within_range"]

# A name that users set levels for; it is documented.
_logger = logging.getLogger("overlap.hooks.powersgd.statistics")

_VERSION = 2
_KEYS = {"version", "rank", "ranks", "steps", "residuals", "factors", "bucket_factors", "is_left", "numel", "generator"}
# No parameter's name has two dots in a row.
_BUCKET = " ... "


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


class Memory:
    """The memory of one rank for one model, by parameter name, so that it does not depend on buckets.

    The name is the fully qualified one. Where only a hook is registered, names are not known; parameters are then
    numbered in the order in which their gradients first come, which depends on the model alone.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        """What compression has left out of this rank's gradients; shaped and strided as they are."""
        self.left: dict[str, Tensor] = {}
        """Mean left factors ``(rank, rows)`` of the last pass, the same on every rank."""
        self.right: dict[str, Tensor] = {}
        """Mean right factors ``(rank, cols)``, with columns in the order of the gradient's shape. A parameter has one
        of the two: only where factors alternate is it ever the left one."""
        self.steps = 0
        """Backward passes begun."""
        self.statistics = Statistics()
        self.directions: dict[tuple[object, ...], Tensor] = {}
        """Random directions that do not change from step to step; not saved."""
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
        keys = {key for key in (*self.residuals, *self.left, *self.right) if _BUCKET not in key}
        _check(context, self._saved_by, self.residuals, keys)
        self._numbers = WeakIdKeyDictionary()
        self._context = context

    def detach(self) -> None:
        """Stop serving the model, so that another one can be attached."""
        self._context = None

    def keys_of(self, bucket: Bucket) -> tuple[str, ...]:
        """What the bucket's parameters are called here."""
        if bucket.fqns is not None:
            return bucket.fqns
        numbers = self._numbers
        return tuple(numbers.setdefault(parameter, str(len(numbers))) for parameter in bucket.parameters)

    def claim(self, keys: Iterable[str]) -> None:
        """These parameters are of the model."""
        self._unclaimed.difference_update(keys)

    def check_claimed(self) -> None:
        """Raises: ConfigurationError: a whole backward has not met all parameters that were loaded."""
        if self._unclaimed:
            raise ConfigurationError(_foreign(self._unclaimed))

    def residual(self, key: str, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual of a parameter in the memory format of ``gradient``, made of zeros if there is none.

        Raises:
            ConfigurationError: the residual was loaded for a parameter of another shape.
        """
        found = self.residuals.get(key)
        if found is None:
            found = self.residuals[key] = _empty_like(gradient, dtype).zero_()
        elif found.shape != gradient.shape:
            raise ConfigurationError(
                f"the residual of parameter {key} has shape {tuple(found.shape)}, but its gradient has "
                f"{tuple(gradient.shape)}: the state of another model was loaded"
            )
        elif (found.stride(), found.dtype, found.device) != (gradient.stride(), dtype, gradient.device):
            found = self.residuals[key] = _empty_like(gradient, dtype).copy_(hold(found))
        return found

    def release(self, keys: Sequence[str], gradients: Sequence[Tensor], exact: Iterable[int]) -> dict[str, Tensor]:
        """Add the residuals of parameters that are not compressed, as in a state that was saved with other options.

        Args:
            keys: of the bucket's parameters.
            gradients: the bucket's.
            exact: places of those that are not compressed.

        Returns:
            The gradients that have changed, for :meth:`settle`.
        """
        released = {}
        for place in exact:
            key = keys[place]
            self.left.pop(key, None)
            self.right.pop(key, None)
            if key in self.residuals:
                released[key] = gradients[place].add_(hold(self.residuals[key]))
        return released

    def settle(self, released: Mapping[str, Tensor]) -> None:
        """Drop the residuals that :meth:`release` added where the mean, the same on all ranks, is finite."""
        for key, mean in released.items():
            residual, is_finite = self.residuals[key], all_finite(mean)
            if has_streams(is_finite.device):
                self.residuals[key] = torch.where(is_finite, torch.zeros_like(residual), hold(residual))
            elif bool(is_finite):
                del self.residuals[key]

    def rounding(self, wire: Wire) -> RoundingGenerator:
        """The random numbers with which ``wire`` rounds, which are remembered."""
        if self._generator is None:
            self._generator = RoundingGenerator(wire)
            self._generator.load(self._generator_state)
        return self._generator

    def forget_factors(self) -> None:
        """Let every factor start from random directions again."""
        self.left.clear()
        self.right.clear()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PowerSGD.state_dict`."""
        group = None if self._context is None else self._context.group
        rank, ranks = (group.rank(), group.size()) if group is not None else self._saved_by or (None, None)
        generator = self._generator_state if self._generator is None else self._generator.state()
        factors = {**self.left, **self.right}
        return {
            "version": _VERSION,
            "rank": rank,
            "ranks": ranks,
            "steps": self.steps,
            "residuals": _cloned(self.residuals),
            "factors": _cloned({key: factor for key, factor in factors.items() if _BUCKET not in key}),
            "bucket_factors": _cloned({key: factor for key, factor in factors.items() if _BUCKET in key}),
            "is_left": bool(self.left),
            "numel": [self.statistics.numel_before, self.statistics.numel_after],
            "generator": None if generator is None else generator.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`PowerSGD.load_state_dict`."""
        _check_form(state)
        rank, ranks = state["rank"], state["ranks"]
        saved_by = None if rank is None or ranks is None else (int(rank), int(ranks))
        keys = {*state["residuals"], *state["factors"]}
        if self._context is not None:
            _check(self._context, saved_by, state["residuals"], keys)
        self.residuals = _cloned(state["residuals"])
        factors = _cloned({**state["factors"], **state["bucket_factors"]})
        self.left, self.right = (factors, {}) if state["is_left"] else ({}, factors)
        self.steps = int(state["steps"])
        self.statistics = Statistics(*map(int, state["numel"]))
        self._generator, self._generator_state = None, state["generator"]
        self._saved_by, self._unclaimed = saved_by, keys

    def __getstate__(self) -> dict[str, Any]:
        # Parameters and process groups are not pickled; pickling serves PowerSGDState.
        return {"state": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(pickled["state"])


def bucket_key(keys: Sequence[str]) -> str:
    """What a whole bucket is called that is one matrix."""
    return f"{keys[0]}{_BUCKET}{keys[-1]}"


def _empty_like(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(gradient.size(), gradient.stride(), dtype=dtype, device=gradient.device)


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def _check_form(state: Any) -> None:
    """Raises: ConfigurationError: ``state`` is not one of PowerSGD."""
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != _VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(f"this is not a state of PowerSGD (version {_VERSION}): {found}")


def _check(
    context: StageContext, saved_by: tuple[int, int] | None, residuals: Mapping[str, Tensor], keys: Iterable[str]
) -> None:
    """Raises: ConfigurationError: the state, of the parameters ``keys``, is another rank's or another model's."""
    here = context.group.rank(), context.group.size()
    if saved_by is not None and saved_by != here:
        raise ConfigurationError(
            f"the state was saved by rank {saved_by[0]} of {saved_by[1]}, but this is rank "
            f"{here[0]} of {here[1]}, and each rank has its own residuals: load this rank's file, or make "
            f"its state with PowerSGD.redistribute(states, rank={here[0]}, ranks={here[1]})"
        )
    if context.names is None:
        return
    shapes = {name: parameter.shape for parameter, name in context.names.items()}
    if foreign := set(keys) - set(shapes):
        raise ConfigurationError(_foreign(foreign))
    for key, residual in residuals.items():
        if residual.shape != shapes[key]:
            raise ConfigurationError(
                f"the state's residual of parameter {key} has shape {tuple(residual.shape)}, but the "
                f"parameter has {tuple(shapes[key])}: it is the state of another model"
            )


def _foreign(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return (
        f"the state has parameters that the model does not have ({', '.join(listed[:5])}"
        f"{', ...' if len(listed) > 5 else ''}): it is the state of another model"
    )


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
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
    for state in states:
        _check_form(state)
        if state["rank"] is None or state["ranks"] is None:
            raise ConfigurationError("a state does not say its rank: it was saved before its PowerSGD was registered")
    first, old_ranks = states[0], states[0]["ranks"]
    for state in states:
        if (state["ranks"], state["steps"]) != (old_ranks, first["steps"]):
            raise ConfigurationError(
                f"states of different runs or steps: rank {state['rank']} of {state['ranks']} after {state['steps']} "
                f"steps beside rank {first['rank']} of {old_ranks} after {first['steps']}"
            )
    by_rank = {state["rank"]: state for state in states}
    needed = range(rank, old_ranks, ranks)
    if missing := [old for old in needed if old not in by_rank]:
        raise ConfigurationError(
            f"rank {rank} of {ranks} needs the states of the old ranks {list(needed)}; {missing} are missing"
        )
    residuals = _summed((by_rank[old]["residuals"] for old in needed), times=ranks / old_ranks)
    # Ranks that rounded by one generator would make the same errors.
    return {**first, "residuals": residuals, "rank": rank, "ranks": ranks, "generator": None}


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
