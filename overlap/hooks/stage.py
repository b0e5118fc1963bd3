"""The Stage interface, and what a chain checks of its stages."""

from __future__ import annotations

import enum
import hashlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks.bucket import Bucket

__all__ = [
    "Background",
    "BucketWatcher",
    "Role",
    "Stage",
    "StageContext",
    "StageOfOneModel",
    "check_pass",
    "check_places",
    "is_same_state",
    "redistributed",
    "walk",
    "with_contexts",
]


class Role(enum.IntEnum):
    """What a stage does with a bucket. The stages of a chain are in this order; transforms may stand anywhere.

    >>> def clamp(bucket):
    ...     bucket.buffer.clamp_(-1, 1)
    >>> [stage.role.name for stage in chain(AllReduce(), clamp).sequence]
    ['REDUCER', 'TRANSFORM']
    """

    TRANSFORM = 0
    """Neither reduces nor updates: changes or looks at what is there, local gradients, means or new parameters."""
    REDUCER = 1
    """Turns this rank's gradients into their mean over ranks."""
    UPDATE = 2
    """Turns the mean into new parameters."""
    AVERAGER = 3
    """Turns parameters into their mean over ranks."""


class BucketWatcher(Protocol):
    """Follows DDP's own buckets, other than those of a replay, whose memory is given up anyway."""

    def arrived(self, bucket: Bucket) -> Bucket:
        """All gradients of ``bucket`` are there; on the thread of backward. Returns the bucket that stages are given.
        When this returns for the last bucket, DDP may use the memory of all."""

    def through(self, bucket: Bucket) -> None:
        """Its last stage is done; on the thread that runs stages and, on accelerators, with their stream current.
        ``bucket`` is the object that arrived."""

    def over(self, *, failed: bool) -> None:
        """Backward is over and DDP has set ``.grad``; on the training thread, before stages are notified."""


Background = Callable[..., None]
"""Runs ``work`` on each of ``items`` outside of a backward pass: ``background(items, work, on_failure=...)``."""


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage may know about the model before the first bucket arrives.

    It does not refer to the model itself: DDP's reducer owns the hook, so the cycle could never be collected. Where
    only a hook is registered, ``names``, ``finds_unused``, ``module`` and ``ddp`` are ``None``.

    >>> class Described(Stage):
    ...     role = Role.TRANSFORM
    ...     def attach(self, context):
    ...         print(context.device, sorted(context.names.values()))
    ...     async def __call__(self, bucket):
    ...         pass
    >>> registration = chain(AllReduce(), Described()).register(ddp)
    cpu ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    group: dist.ProcessGroup
    device: torch.device
    """Device of the model's parameters, or of the first bucket."""
    names: Mapping[torch.Tensor, str] | None
    """Fully qualified name of each parameter that DDP reduces."""
    finds_unused: bool | None
    """Whether DDP accepts parameters without a gradient (``find_unused_parameters`` or ``static_graph``)."""
    module: weakref.ref[torch.nn.Module] | None = None
    """The wrapped module."""
    ddp: weakref.ref[DistributedDataParallel] | None = None
    """The model itself."""
    is_joining: Callable[[], bool] = lambda: False
    """Whether the model is inside of a ``Join``, overlap's or PyTorch's."""
    tell: Callable[[BaseException], None] = lambda error: None
    """Reports an error in the training loop between two passes, after which this rank stops, to the other ranks."""
    note_unfinished: Callable[[], None] = lambda: None
    """Has DDP forget the backward that it has prepared, before the next forward: it ended with an error."""
    watch: Callable[[BucketWatcher], object] = lambda watcher: None
    """Notifies a :class:`BucketWatcher` of buckets from now on, until the registration is removed."""
    background: Background | None = None
    """Runs work outside of a backward pass, on the same connections and after all work begun before; never ``None`` in
    :meth:`Stage.attach`."""

    @property
    def model_in_words(self) -> str:
        """The same text on every rank, if the model's parameters are the same."""
        if self.names is None:
            return "a model"
        layout = [(name, tuple(parameter.shape), str(parameter.dtype)) for parameter, name in self.names.items()]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
        return f"a model of {len(layout)} parameters (names, shapes and dtypes: {digest})"


class Stage(ABC):
    """One step of a bucket's processing: straight-line code that changes the bucket in place and awaits collectives.

    A stage is called for every bucket of every backward pass, in the order of the buckets, also on a rank that has run
    out of inputs and takes part with zeros. It must issue the same collectives on every rank. A scheduler runs the
    stages of all buckets as coroutines, in an order that is the same on every rank: between two ``await`` no other
    stage runs, and no collective is launched from a callback.

    >>> class Mean(Stage):
    ...     async def __call__(self, bucket):
    ...         await all_reduce(bucket.buffer, group=bucket.group)
    ...         bucket.buffer.div_(bucket.divisor)
    >>> chain(Mean()).register(ddp)
    <chain(Mean()) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    role: Role = Role.REDUCER

    @abstractmethod
    async def __call__(self, bucket: Bucket) -> None:
        """Change ``bucket.buffer`` or the bucket's parameters in place."""

    # Called by the scheduler. The defaults fit most stages.

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:  # noqa: B027
        """Called before :meth:`attach`, with the stages of the chain around this one; raise to refuse the place."""

    def attach(self, context: StageContext) -> None:  # noqa: B027
        """Called once, when the stage is registered; raise to refuse a model."""

    def check_together(self, stages: Sequence[Stage]) -> None:  # noqa: B027
        """Called once, when all stages of a chain are attached and before any collective; raise to refuse them."""

    def context_of(self, child: Stage, context: StageContext) -> StageContext:
        """What ``child`` is attached with, given the ``context`` of this stage."""
        return context

    def detach(self) -> None:  # noqa: B027
        """Called when the registration is removed."""

    def before_forward(self) -> None:  # noqa: B027
        """Called before each forward of the model that records gradients."""

    def before_backward(self, *, is_replay: bool) -> None:  # noqa: B027
        """Called on the training thread when the first bucket of a pass arrives, before any collective of the pass."""

    def after_backward(self, *, failed: bool) -> str | None:
        """Called on the training thread when all buckets of a pass are done and DDP has set ``.grad``; ``failed`` where
        a stage raised. ``backward()`` then raises that error, with the returned text as a note."""
        return None

    def note_result(self, result: Tensor) -> None:  # noqa: B027
        """Called with the result of another reducer of the same pass, the same on all ranks. Where it is not finite the
        pass is not applied, so a stage with memory drops what the pass would change."""

    def state_dict(self) -> dict[str, Any]:
        """The stage's memory between steps on this rank: tensors and plain values by name."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Raises: ConfigurationError: it is not this stage's."""
        if state_dict:
            raise ConfigurationError(f"{self!r} has no state to load, but was given {sorted(state_dict)}")

    def redistribute(self, states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """The state to load on ``rank`` of ``ranks``, from the :meth:`state_dict` of all ranks of another number, in
        their order; here for a stage whose state is the same on every rank.

        Raises:
            ConfigurationError: the states differ.
        """
        parts = self.state_parts
        own = [{key: value for key, value in state.items() if key not in parts} for state in states]
        if not all(is_same_state(state, own[0]) for state in own):
            raise ConfigurationError(
                f"{self!r} remembers other things on each rank, and has no rule for another number of ranks: resume "
                f'with {len(states)}, or set state["stages"]["state"] = {{}} in every state, and all stages begin anew'
            )
        made = own[0]
        for key, stage in parts.items():
            if state := redistributed(stage, [state.get(key, {}) for state in states], rank=rank, ranks=ranks):
                made[key] = state
        return made

    # Facts about a stage, for the stages around it and for the scheduler. Most are of updates or transforms.

    @property
    def state_parts(self) -> Mapping[str, Stage]:
        """The stages whose states are in this one's :meth:`state_dict`, by key."""
        return {}

    @property
    def children(self) -> tuple[Stage, ...]:
        """The stages that this one is made of."""
        return ()

    @property
    def sequence(self) -> tuple[Stage, ...]:
        """The stages that run one after another on a bucket: this one, or those of a chain."""
        return (self,)

    @property
    def as_code(self) -> str:
        """This stage in a message, as a user types it."""
        return repr(self)

    @property
    def signature(self) -> str:
        """What must be the same on every rank, as text; ranks compare it at registration, so it has no addresses."""
        return f"{type(self).__name__}({', '.join(child.signature for child in self.children)})"

    @property
    def settings(self) -> Mapping[str, str]:
        """Values beside :attr:`signature` that must be the same on every rank, as text by name, such as a learning
        rate."""
        return {}

    @property
    def reduces(self) -> bool:
        """Whether it starts from this rank's own gradients, as reducers and ``ZeroStep`` do."""
        return self.role is Role.REDUCER

    @property
    def needs_mean(self) -> bool:
        """Whether a transform is meant for the mean, so that ``ZeroStep`` must reduce before it."""
        return False

    @property
    def updated(self) -> Sequence[Tensor]:
        """The parameters that an update updates."""
        return ()

    def reducer_for(self, updates: Sequence[Stage]) -> Stage | None:
        """The reduction of an update that reduces by itself, as a stage that serves all of ``updates``."""
        return None

    @property
    def edits_gradients(self) -> bool:
        """Whether a transform changes gradients, so that another backward would add to changed ones."""
        return self.role is Role.TRANSFORM

    @property
    def commutes_with_scaling(self) -> bool:
        """Whether a transform of scaled gradients, unscaled afterwards, is the transform of unscaled ones."""
        return True

    @property
    def leaves_update(self) -> bool:
        """Whether the update of the backward under way is left to the loop's ``step()``."""
        return False

    @property
    def updates_after_backward(self) -> bool:
        """Whether new parameters are in place only after backward, so that no transform can follow."""
        return False

    def check_skippable(self, context: StageContext) -> None:
        """Called at registration by a stage that may skip this update; raises if it cannot be skipped."""
        raise UnsupportedError(f"{self!r} cannot leave out the update of a pass; use Step(optimizer) or ZeroStep(zero)")

    def skip_if(self, found_inf: Tensor) -> None:
        """Skip the update of the pass under way where ``found_inf``, 0-dimensional, is not zero."""
        raise UnsupportedError(f"{self!r} cannot leave out the update of a pass")

    @property
    def starts_on_autograd_thread(self) -> bool:
        """Whether the code before the first ``await`` must run where DDP calls hooks, when the bucket arrives."""
        return any(child.starts_on_autograd_thread for child in self.children)

    def passed(self, bucket: Bucket) -> Bucket:
        """``bucket`` as the next stage of the chain sees it."""
        return bucket.with_mean() if self.role is Role.REDUCER else bucket

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    if not TYPE_CHECKING:  # Or every attribute would be known to type checkers.

        def __getattr__(self, name: str) -> Any:
            # What frameworks and DDP itself ask of a communication hook, in place of which a stage is given at times.
            if name == "__signature__":
                return _SIGNATURE
            if name in ("__name__", "__qualname__"):
                whole = repr(self) if self.sequence != (self,) else f"chain({self!r})"
                raise _NotAHookError(
                    f"{self!r} is a stage, not a communication hook: call {whole}.register(ddp); where a framework "
                    f"registers the hook, give it overlap.as_hook({self!r})"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class StageOfOneModel(Stage):
    """A stage that serves one model at a time, and whose state may be loaded before it is attached.

    Its state belongs to a *place*, such as this rank of so many: a plain value that is saved with the state.
    :meth:`check_place` is called where both are known: when the stage is attached, or when a state is loaded later.
    """

    context: StageContext | None = None
    """Where it is attached."""
    _saved_at: Any = None

    @abstractmethod
    def place_in(self, context: StageContext) -> Any:
        """The place of a state that is saved now."""

    @abstractmethod
    def check_place(self, saved_at: Any, context: StageContext) -> None:
        """Raises: ConfigurationError: a state that was saved at this place is not for ``context``."""

    @property
    def place(self) -> Any:
        """To be saved with the state; ``None`` where it is not known."""
        return self._saved_at if self.context is None else self.place_in(self.context)

    @place.setter
    def place(self, saved_at: Any) -> None:
        """Called with the place of a state before that is loaded."""
        if saved_at is not None and self.context is not None:
            self.check_place(saved_at, self.context)
        self._saved_at = saved_at

    def attach(self, context: StageContext) -> None:
        if self.context is not None:
            raise RegistrationError(f"{self!r} is registered with a model already; give each model one of its own")
        if self._saved_at is not None:
            self.check_place(self._saved_at, context)
        self.context = context

    def detach(self) -> None:
        if self.context is not None:
            self._saved_at = self.place
        self.context = None


# Without annotations, which DDP compares with its own types.
_SIGNATURE = inspect.Signature([inspect.Parameter("bucket", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


class _NotAHookError(RegistrationError, AttributeError):
    """An AttributeError, so that whoever asks whether a stage has a name learns that it has none."""


def walk(stage: Stage) -> Iterator[Stage]:
    """``stage`` and all stages that it is made of."""
    yield stage
    for child in stage.children:
        yield from walk(child)


def redistributed(stage: Stage, states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """:meth:`Stage.redistribute` of states that may all be empty, as before the first pass."""
    return stage.redistribute(states, rank=rank, ranks=ranks) if any(states) else {}


def with_contexts(stage: Stage, context: StageContext) -> Iterator[tuple[Stage, StageContext]]:
    """``stage`` and all stages that it is made of, each with its context, made when its parent has been attached."""
    yield stage, context
    for child in stage.children:
        yield from with_contexts(child, stage.context_of(child, context))


def check_places(sequence: Sequence[Stage]) -> None:
    """Have each stage of a chain check what stands around it. Raises: ConfigurationError: a place is wrong."""
    for place, stage in enumerate(sequence):
        before, after = sequence[:place], sequence[place + 1 :]
        if stage.role is Role.TRANSFORM:
            _check_transform(stage, before, after)
        stage.placed(before, after)


def _check_transform(stage: Stage, before: Sequence[Stage], after: Sequence[Stage]) -> None:
    updates = [one for one in before if one.role is Role.UPDATE]
    if not updates:
        return
    later = next((one for one in after if one.role is Role.UPDATE), None)
    if later is not None:
        raise ConfigurationError(
            f"{stage!r} stands between the updates {updates[-1]!r} and {later!r}, where some parameters are new and "
            "some are not: put it before both or after both"
        )
    deferred = next((one for one in updates if one.updates_after_backward), None)
    if deferred is not None:
        raise ConfigurationError(
            f"{stage!r} stands after {deferred!r}, which makes new parameters only after backward, so it would see "
            "the old ones: put it before the update, use an update that is made in backward, or do the same by hand "
            "after step()"
        )


def check_pass(sequence: Sequence[Stage]) -> None:
    """Raises: TrainingLoopError: a transform of new parameters would see old ones in the backward that begins."""
    skipped: Stage | None = None
    for stage in sequence:
        if stage.role is Role.UPDATE and stage.leaves_update:
            skipped = skipped or stage
        elif stage.role is Role.TRANSFORM and skipped is not None:
            raise TrainingLoopError(
                f"skip_update() leaves the update of {skipped!r} to step(), so {stage!r} after it would see old "
                "parameters: leave that stage out, and do the same by hand after step()"
            )


def is_same_state(one: Any, other: Any) -> bool:
    """Whether nested tensors and plain values are the same, tensors bit for bit.

    >>> is_same_state({"mean": torch.tensor([float("nan")])}, {"mean": torch.tensor([float("nan")])})
    True
    >>> is_same_state({"mean": torch.tensor([0.0])}, {"mean": torch.tensor([-0.0])})
    False
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits_of(one), _bits_of(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same_state(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
