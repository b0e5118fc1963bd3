"""What a stage is."""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from overlap.errors import ConfigurationError, RegistrationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.context import StageContext
from overlap.hooks.same_state import is_same_state

__all__ = ["Role", "Stage", "StageContext", "redistributed", "walk", "with_contexts"]


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

    # What follows has a default that fits most stages.

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:  # noqa: B027
        """Called at registration, before :meth:`attach`, with the stages of the chain around this one; raise here to
        refuse the place. Not called on stages inside of other stages than chains."""

    def attach(self, context: StageContext) -> None:  # noqa: B027
        """Called once, when the stage is registered, before anything else; raise here to refuse a model."""

    def check_together(self, stages: Sequence[Stage]) -> None:  # noqa: B027
        """Called once, when all stages are attached, with those that run one after another; raise here to refuse
        them. No collective has been issued yet."""

    def context_of(self, child: Stage, context: StageContext) -> StageContext:
        """What ``child`` is attached with; here ``context``, with which this stage has been attached."""
        return context

    def detach(self) -> None:  # noqa: B027
        """Called when the registration is removed."""

    def before_forward(self) -> None:  # noqa: B027
        """Called before each forward of the model that records gradients."""

    def before_backward(self, *, is_replay: bool) -> None:  # noqa: B027
        """Called on the training thread when the first bucket of a pass arrives, before any collective of the pass."""

    def after_backward(self, *, failed: bool) -> str | None:
        """Called on the training thread when all buckets of a pass are done and DDP has set ``.grad``.

        ``failed`` says that a stage raised, so some buckets may not be complete; ``backward()`` then raises that error,
        with the returned text as a note.
        """
        return None

    def note_result(self, result: Tensor) -> None:  # noqa: B027
        """Called with what another reducer of the same pass has made, the same on all ranks.

        A pass with a result that is not finite is not applied, so a stage with memory that it would change drops the
        change.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the stage remembers between steps on this rank: tensors and plain values by name."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: the stage has no state and ``state_dict`` is not empty.
        """
        if state_dict:
            raise ConfigurationError(f"{self!r} has no state to load, but was given {sorted(state_dict)}")

    def redistribute(self, states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """The state to load on ``rank`` of ``ranks``, from those of :meth:`state_dict` on all ranks of another number.

        As it is here for a stage whose own state is the same on every rank; :attr:`state_parts` have their own rules.

        Args:
            states: of all old ranks, in their order.
            rank: this rank in the new group.
            ranks: size of the new group.

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
        """Whether the stage starts from this rank's own gradients; also true of an update that reduces by itself."""
        return self.role is Role.REDUCER

    @property
    def needs_mean(self) -> bool:
        """Whether a transform is meant for the mean, so that an update which reduces by itself reduces before it."""
        return False

    @property
    def updated(self) -> Sequence[Tensor]:
        """The parameters that an update makes new values of, now; no two updates of a chain have one in common."""
        return ()

    def reducer_for(self, updates: Sequence[Stage]) -> Stage | None:
        """The reduction of an update that reduces by itself, as a stage of its own that serves ``updates``, this one
        among them; ``None`` if it has none."""
        return None

    @property
    def edits_gradients(self) -> bool:
        """Whether a transform changes gradients, so that another backward would add to what was changed already."""
        return self.role is Role.TRANSFORM

    @property
    def commutes_with_scaling(self) -> bool:
        """Whether gradients of a scaled loss are right for it: divided by the scale afterwards, they are the same."""
        return True

    @property
    def leaves_update(self) -> bool:
        """Whether the update of the backward under way is left to the loop's ``step()``."""
        return False

    @property
    def updates_after_backward(self) -> bool:
        """Whether new parameters are in place only after backward, so that nothing can follow it in a chain."""
        return False

    def check_skippable(self, context: StageContext) -> None:
        """Called at registration by a stage before this update that may have it left out.

        Raises:
            UnsupportedError: it cannot be left out without a wait of the host, or at all.
        """
        raise UnsupportedError(f"{self!r} cannot leave out the update of a pass; use Step(optimizer) or ZeroStep(zero)")

    def skip_if(self, found_inf: Tensor) -> None:
        """Have the update of the pass under way change nothing where ``found_inf``, 0-dimensional, is not zero."""
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
    """``stage`` and all stages that it is made of, each with what it is attached with.

    Those of a stage's children are made when it has been attached.
    """
    yield stage, context
    for child in stage.children:
        yield from with_contexts(child, stage.context_of(child, context))
