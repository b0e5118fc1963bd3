"""The memory of a stage that rounds: errors, to be added in the next step, and random numbers.

Error feedback: Seide et al., 2014; Karimireddy et al., 2019.

[Note: memory and the step]

A pass reads what the pass before it has left, and changes no tensor in place that a step has left: it puts new ones
beside them. When the step is made, :meth:`StageMemory.commit` puts these in their place. Where it is not made,
:meth:`StageMemory.discard` drops them, so that the batch never was: the loop has discarded the gradients, the pass has
failed, or gradients are not finite, which on an accelerator the device decides and the host does not learn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams, hold, whole_of
from overlap._torch.foreach import add_all
from overlap.errors import ConfigurationError, RegistrationError
from overlap.hooks.stage import Stage, StageContext
from overlap.hooks.states import StatesOfRanks, alike_in, copied
from overlap.hooks.wires.codec import Wire
from overlap.hooks.wires.exchange import QuantizedSum
from overlap.ranks.machines import Levels, levels_of

_Place = tuple[int, int]
"""A rank and the number of ranks."""


class RoundingGenerator:
    """Random numbers with which ``wire`` rounds on this rank: its own, not those of the model's dropout."""

    def __init__(self, wire: Wire | None) -> None:
        self.is_needed = wire is not None and wire.is_stochastic
        self._generator: torch.Generator | None = None
        self._state: Tensor | None = None
        # As the last step has left it, once a pass has begun since.
        self._committed: Tensor | None = None

    def for_rank(self, rank: int, device: torch.device) -> torch.Generator | None:
        """The same at every call, seeded with ``rank`` or the loaded state; ``None`` if rounding is to nearest."""
        if self.is_needed and self._generator is None:
            self._generator = torch.Generator(device).manual_seed(rank)
            if self._state is not None:
                self._generator.set_state(self._state)
            self.begin()
        return self._generator

    def begin(self) -> None:
        """A pass begins. See [Note: memory and the step]."""
        if self._generator is not None and self._committed is None:
            self._committed = self._generator.get_state()

    def settle(self, *, is_made: bool) -> None:
        """The step is made, or not: the same numbers are drawn again."""
        if self._generator is not None and self._committed is not None and not is_made:
            self._generator.set_state(self._committed)
        self._committed = None

    def state(self, *, is_committed: bool = False) -> Tensor | None:
        """For :meth:`load`, as it is, or as the last step has left it; ``None`` before the first use."""
        if is_committed and self._committed is not None:
            return self._committed
        return self._state if self._generator is None else self._generator.get_state()

    def load(self, state: Tensor | None) -> None:
        """Continue from a :meth:`state`; start anew if it is ``None``."""
        # A checkpoint may have been loaded to an accelerator.
        self._state, self._generator, self._committed = None if state is None else state.cpu(), None, None


class StageMemory:
    """Errors and random numbers of one user of a wire, on its rank; it may be loaded before its stage is registered.

    Values are kept by parameter name, so that they stay valid when DDP rebuilds its buckets. See [Note: memory and the
    step]. Messages name ``owner``.
    """

    def __init__(self, owner: object, *, error_feedback: bool, wire: Wire | None) -> None:
        self.has_feedback = error_feedback
        self.generator = RoundingGenerator(wire)
        self._owner, self._wire = owner, wire
        # By kind and name, as the last step has left them; and what passes since have put in their place.
        self._committed: dict[tuple[str, str], Tensor] = {}
        self._tentative: dict[tuple[str, str], Tensor | None] = {}
        # Whether one of several updates has left some of a pass tentative: then a bucket's memory is of two steps.
        self._is_split = False
        self.counts: dict[str, int] = {}
        """Numbers that passes change, the same on all ranks."""
        self._committed_counts: dict[str, int] = {}
        self._saved_by: _Place | None = None
        self._context: StageContext | None = None
        self._levels: Levels | None = None

    # A pass.

    def begin(self) -> None:
        """A pass begins."""
        self.generator.begin()

    def find_levels(self) -> None:
        """Make the groups of several machines; called in a pass, in which ranks have the same stages."""
        if self._wire is not None and self._context is not None:
            self._levels = levels_of(self._context.group, self._context.device)

    def get(self, name: str, kind: str = "error") -> Tensor | None:
        """The value of a parameter that the last pass has left, not to be changed in place; ``None`` if there is none.

        Another tensor in every pass: ask again in each.
        """
        key = (kind, name)
        return self._tentative[key] if key in self._tentative else self._committed.get(key)

    def has_any(self, keys: Collection[tuple[str, str]]) -> bool:
        """Whether there is a value of any kind and name of ``keys``."""
        return not (self._committed.keys().isdisjoint(keys) and self._tentative.keys().isdisjoint(keys))

    def put(self, names: Sequence[str], values: Sequence[Tensor], kind: str = "error") -> None:
        """Put new values."""
        self._tentative.update({(kind, name): value for name, value in zip(names, values, strict=True)})

    def drop(self, names: Sequence[str], kind: str = "error") -> None:
        """Leave no values of these names."""
        for name in names:
            if (kind, name) in self._committed:
                self._tentative[kind, name] = None
            else:
                self._tentative.pop((kind, name), None)

    def values(self, kind: str = "error") -> dict[str, Tensor]:
        """Those to be saved, by name: as the last step has left them, or where the chain does not learn of steps, the
        last pass."""
        every = {**self._committed, **({} if self._learns_of_steps else self._tentative)}
        return {name: value for (one, name), value in every.items() if one == kind and value is not None}

    def add_errors(self, names: Sequence[str], values: Sequence[Tensor]) -> None:
        """Add the errors of earlier steps to ``values``, fp32, in place.

        Raises:
            ConfigurationError: a loaded error does not have the shape of the value.
        """
        changed, errors = [], []
        for name, value in zip(names, values, strict=True):
            key = ("error", name)
            if (error := self._tentative[key] if key in self._tentative else self._committed.get(key)) is not None:
                check_shape(name, error, value)
                changed.append(value)
                errors.append(hold(error.to(value.device)))
        add_all(changed, errors)

    def note_largest(self, largest: Tensor) -> None:
        """Results of this pass, the same on all ranks, have these largest magnitudes, which may not be finite."""
        if self._context is not None:
            self._context.note_largest(largest)

    # The step.

    def commit(self, others: Collection[str] = ()) -> None:
        """The step is made: what passes have put, but for ``others`` among the names, stays."""
        for key in [key for key in self._tentative if key[1] not in others]:
            if (value := self._tentative.pop(key)) is None:
                self._committed.pop(key, None)
            else:
                self._committed[key] = value
        self._is_split = bool(self._tentative)
        self.generator.settle(is_made=True)
        self._committed_counts = dict(self.counts)

    def discard(self, found_inf: Tensor | None = None, others: Collection[str] = ()) -> None:
        """The step is not made: drop what passes have put, but for ``others`` among the names.

        With ``found_inf``, a bool, 0-dimensional: only if it is true. On an accelerator the host does not learn that:
        counts and random numbers then go on in any case.
        """
        keys = [key for key in self._tentative if key[1] not in others]
        if found_inf is not None and has_streams(found_inf.device):
            self._discard_where(found_inf, keys)
        elif found_inf is None or found_inf:
            for key in keys:
                del self._tentative[key]
            if not self._tentative:
                self.generator.settle(is_made=False)
                self.counts = dict(self._committed_counts)

    def _discard_where(self, found_inf: Tensor, keys: Sequence[tuple[str, str]]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        is_whole = len(keys) == len(self._tentative) and not self._is_split
        for key in keys:
            new, old = self._tentative[key], self._committed.get(key)
            if new is not None and old is not None and old.shape == new.shape:
                pairs.append((new, old))
            elif new is not None and key[0] == "error":  # There was none. A first basis may be any.
                hold(new).masked_fill_(found_inf, 0)
                is_whole = False
        for new, old in _as_wholes(pairs) if is_whole else pairs:
            torch.where(found_inf, hold(old.to(new)), hold(new), out=new)

    @property
    def _learns_of_steps(self) -> bool:
        return self._context is not None and self._context.learns_of_steps

    # Where it serves.

    def replan(self) -> None:
        """Plans that stages have made are no longer valid."""
        if self._context is not None:
            self._context.replan()

    def sum_of(self, numel: int, group: dist.ProcessGroup, device: torch.device) -> QuantizedSum:
        """The sum of ``numel`` values over ``group`` by the wire. The levels are those of the model's own group."""
        assert self._wire is not None, "values are sent by a wire"
        is_own = self._context is not None and group is self._context.group
        return QuantizedSum(
            numel,
            wire=self._wire,
            generator=self.generator.for_rank(group.rank(), device),
            group=group,
            levels=self._levels if is_own else None,
        )

    @property
    def place(self) -> _Place | None:
        """The rank that it belongs to, and the number of ranks; ``None`` if it belongs to none yet."""
        return self._saved_by if self._context is None else _place(self._context)

    def attach(self, context: StageContext) -> None:
        """Serve the model of ``context``.

        Raises:
            RegistrationError: it keeps errors, and serves another model already.
            ConfigurationError: the state that was loaded is another rank's or another model's.
        """
        # A hook that was registered with DDP itself, which does not tell names, is never detached.
        if self.has_feedback and self._context is not None and self._context.names is not None:
            raise RegistrationError(
                f"{self._owner!r} is registered already, and remembers the errors of one model: .remove() that "
                "registration first, or give each model a stage of its own"
            )
        self._check(context, self._saved_by, self.values())
        self._context = context

    def detach(self) -> None:
        """Stop serving the model; the memory stays, without a step that is not made."""
        (self.discard if self._learns_of_steps else self.commit)()
        if self._committed or self.generator.state() is not None:
            self._saved_by = self.place
        self._context = None

    def state_dict(self) -> dict[str, Any]:
        """A snapshot: ``error`` by parameter name and the rounding's ``generator``, where there are such, with the
        ``rank`` and number of ``ranks`` that they belong to."""
        state: dict[str, Any] = {}
        if self.has_feedback:
            state["error"] = {name: copied(error) for name, error in self.values().items()}
        if (generator := self.generator.state(is_committed=self._learns_of_steps)) is not None:
            state["generator"] = generator
        if state and self.place is not None:
            state["rank"], state["ranks"] = self.place
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` of this rank; without a key, as before the first pass.

        Raises:
            ConfigurationError: ``state_dict`` has unknown keys, has errors and this memory keeps none, or is another
                model's or another rank's.
        """
        if unknown := sorted(set(state_dict) - {"error", "generator", "rank", "ranks"}):
            raise ConfigurationError(f"{self._owner!r} has no state {unknown}")
        errors = state_dict.get("error", {})
        if errors and not self.has_feedback:
            raise ConfigurationError(
                f"the state has error feedback, but {self._owner!r} has none: make it with error_feedback=True"
            )
        saved_by = (state_dict["rank"], state_dict["ranks"]) if {"rank", "ranks"} <= set(state_dict) else None
        if self._context is not None:
            self._check(self._context, saved_by, errors)
        self._saved_by = saved_by
        self._committed = {("error", name): error.clone() for name, error in errors.items()}
        self._tentative = {}
        self.generator.load(state_dict.get("generator"))
        self.replan()

    def _check(self, context: StageContext, saved_by: _Place | None, errors: Mapping[str, Tensor]) -> None:
        """Raises: ConfigurationError: the state is another rank's, or another model's."""
        rank, ranks = here = _place(context)
        is_of_rank = self.has_feedback or self.generator.is_needed
        if saved_by is not None and saved_by != here and is_of_rank:
            raise ConfigurationError(
                f"the state was saved by rank {saved_by[0]} of {saved_by[1]}, but this is rank {rank} of {ranks}, and "
                "each rank has its own errors: load this rank's file, or make its state with "
                f"{type(self._owner).__name__}.redistribute(states, rank={rank}, ranks={ranks})"
            )
        if context.names is None:
            return
        parameters = {name: parameter for parameter, name in context.names.items()}
        if foreign := sorted(set(errors) - set(parameters)):
            raise ConfigurationError(
                f"the state has the error feedback of parameters that the model does not have "
                f"({', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}): it is the state of another model"
            )
        for name, error in errors.items():
            check_shape(name, error, parameters[name])


class StageWithMemory(Stage):
    """A stage that remembers errors: its memory follows the step. See [Note: memory and the step]."""

    _memory: StageMemory

    def attach(self, context: StageContext) -> None:
        self._memory.attach(context)

    def detach(self) -> None:
        self._memory.detach()

    def before_backward(self, *, is_replay: bool) -> None:
        self._memory.begin()
        self._memory.find_levels()

    def commit(self, *, others: Collection[str] = ()) -> None:
        self._memory.commit(others)

    def discard(self, *, found_inf: Tensor | None = None, others: Collection[str] = ()) -> None:
        self._memory.discard(found_inf, others)

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of this rank's memory, of tensors and plain values; each rank saves its own."""
        return self._memory.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, before or after registering; for another number of ranks,
        see :meth:`redistribute`.

        Raises:
            ConfigurationError: the state does not fit this stage, model or rank; also raised when registering.
        """
        self._memory.load_state_dict(state_dict)


def _as_wholes(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The wholes of which ``pairs`` of a new and an old tensor are views, to take one kernel for all of a bucket; where
    they are views of other places in one than in the other, the pairs."""
    wholes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for new, old in pairs:
        if (new.storage_offset(), new.stride(), new.dtype) != (old.storage_offset(), old.stride(), old.dtype):
            return list(pairs)
        whole = whole_of(new), whole_of(old)
        wholes[id(whole[0]), id(whole[1])] = whole
    is_unique = len({new for new, _ in wholes}) == len(wholes)
    return list(wholes.values() if is_unique and all(new.shape == old.shape for new, old in wholes.values()) else pairs)


def _place(context: StageContext) -> _Place:
    return context.group.rank(), context.group.size()


def check_shape(name: str, error: Tensor, like: Tensor) -> None:
    """Raises: ConfigurationError: ``error`` is not of the shape of the parameter ``name``."""
    if error.shape != like.shape:
        raise ConfigurationError(
            f"the error feedback of {name} is of shape {tuple(error.shape)}, its gradient of {tuple(like.shape)}: the "
            "state that was loaded is another model's"
        )


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state of ``rank`` of ``ranks``, from the states of all old ranks, in any order.

    Errors are parts of the mean, so their sum over ranks is still to be delivered, and stays the same: new rank ``r``
    gets the sum of those of the old ranks ``r``, ``r + ranks`` and so on, or none. Generators start anew; values that
    are the same on all ranks stay.

    Raises:
        ConfigurationError: ``rank`` is out of range, a state is missing, or states do not belong together.
    """
    errors = summed_errors(states, "error", rank=rank, ranks=ranks)
    return {**alike_in(states, rank, but=("error", "generator")), "error": errors, "rank": rank, "ranks": ranks}


def summed_errors(
    states: Sequence[Mapping[str, Any]], key: str, *, rank: int, ranks: int, times: float = 1.0
) -> dict[str, Tensor]:
    """The errors ``state[key]`` of ``rank`` of ``ranks``, as for :func:`redistribute`, ``times`` a number."""
    if not 0 <= rank < ranks:
        raise ConfigurationError(f"rank={rank} is out of range for ranks={ranks}: it is 0 to {ranks - 1}")
    places = range(len(states)) if isinstance(states, StatesOfRanks) else _places(states)
    sums: dict[str, Tensor] = {}
    for old in range(rank, len(states), ranks):
        for name, error in states[places[old]].get(key, {}).items():
            sums[name] = sums[name] + error if name in sums else error
    return {name: total * times for name, total in sums.items()}


def _places(states: Sequence[Mapping[str, Any]]) -> Sequence[int]:
    """Where the state of each old rank is. Raises: ConfigurationError: they are not those of all ranks, each once."""
    if any(state.get("rank") is None or state.get("ranks") is None for state in states):
        raise ConfigurationError("a state does not say its rank: it was saved before the first pass of its stage")
    found = [state["rank"] for state in states]
    sizes = sorted({state["ranks"] for state in states})
    if sizes != [len(states)] or sorted(found) != list(range(len(states))):
        raise ConfigurationError(
            f"redistribute needs the state of every old rank once, but was given ranks {sorted(set(found))} of {sizes}"
        )
    return [found.index(rank) for rank in range(len(states))]
