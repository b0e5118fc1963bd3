"""What the transforms that are shipped have in common."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, RegistrationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import whole_pass
from overlap.hooks.stage import Role, Stage, StageContext

__all__ = ["Place", "Transform", "WholePassTransform"]


class Place(enum.Enum):
    """Where a transform stands, which says what it sees."""

    LOCAL = "local gradients"
    """Before the reducer: this rank's own gradients."""
    MEAN = "mean gradients"
    """After it: their mean over ranks."""
    UPDATED = "parameters"
    """After an update: the new parameters."""


class Transform(Stage):
    """A stage that changes, or looks at, what is there where it stands: local gradients, their mean, new parameters.

    Subclasses use :meth:`seen`. One object stands in one place of one chain.

    >>> class Halve(Transform):
    ...     async def __call__(self, bucket):
    ...         for tensor in self.seen(bucket):
    ...             tensor.mul_(0.5)
    >>> chain(AllReduce(), Halve()).register(ddp)
    <chain(AllReduce(), Halve()) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    role = Role.TRANSFORM

    def __init__(self) -> None:
        self._place: Place | None = None
        self._context: StageContext | None = None

    @property
    def place(self) -> Place:
        """Where it stands, once it is registered."""
        assert self._place is not None, f"{self!r} is not registered"
        return self._place

    @property
    def context(self) -> StageContext:
        """Where it is registered."""
        assert self._context is not None, f"{self!r} is not registered"
        return self._context

    @property
    def signature(self) -> str:
        return repr(self)

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        if self._context is not None or self in before:
            raise RegistrationError(
                f"{self!r} is registered already, and serves one place of one model: make a {type(self).__name__} for "
                "each, or .remove() that registration first"
            )
        if any(stage.role is Role.UPDATE for stage in before):
            self._place = Place.UPDATED
        elif any(stage.reduces for stage in before):
            self._place = Place.MEAN
        else:
            self._place = Place.LOCAL

    def attach(self, context: StageContext) -> None:
        if self._place is None:
            raise ConfigurationError(
                f"{self!r} stands inside of another stage: put it into the chain itself, before or after that stage"
            )
        self._context = context

    def detach(self) -> None:
        self._place = self._context = None

    def seen(self, bucket: Bucket) -> Sequence[Tensor]:
        """What it acts on, one tensor for each of ``bucket.parameters``, empty where this rank has nothing of it.

        Gradients have the shapes of their parameters; after a reduce-scatter they are this rank's flat parts.
        """
        if self.place is Place.UPDATED:
            return bucket.parameters
        if bucket.owned is None:
            return bucket.gradients
        whole = zip(bucket.owned, bucket.gradients, bucket.parameters, strict=True)
        return [gradient if part is None else _like(part, parameter) for part, gradient, parameter in whole]

    def counted(self, bucket: Bucket) -> Sequence[Tensor]:
        """As :meth:`seen`, but what all ranks have alike is empty on all but one, so that a sum over ranks counts it
        once."""
        seen, is_first = self.seen(bucket), bucket.group.rank() == 0
        parts = [None] * len(seen) if bucket.owned is None else bucket.owned
        return [
            one.reshape(-1)[:0] if part is None and not is_first else one for part, one in zip(parts, seen, strict=True)
        ]

    def refuse_parameters(self) -> None:
        """Raises: ConfigurationError: it stands after an update, and is meant for gradients."""
        if self._place is Place.UPDATED:
            raise ConfigurationError(
                f"{self!r} acts on gradients, and stands after an update: put it before the update; a function of a "
                "bucket can change bucket.parameters there"
            )


class WholePassTransform(Transform):
    """A transform that acts once in a pass, on all buckets together, when all have come."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived: list[Bucket] = []

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        super().placed(before, after)
        hook = next((stage for stage in after if stage.starts_on_autograd_thread), None)
        if hook is not None:
            raise ConfigurationError(
                f"{self!r} waits for the whole pass, and {hook!r} after it must be called where DDP calls hooks, when "
                f"its bucket arrives: put {self!r} after the hook"
            )

    def before_backward(self, *, is_replay: bool) -> None:
        self._arrived.clear()

    def look(self, bucket: Bucket) -> None:
        """A bucket has come."""

    @abstractmethod
    async def act(self, buckets: Sequence[Bucket]) -> None:
        """Called once in a pass, with all its buckets in the order in which they came."""

    async def __call__(self, bucket: Bucket) -> None:
        self.look(bucket)
        self._arrived.append(bucket)
        await whole_pass()
        if bucket.is_last:
            arrived, self._arrived = self._arrived, []
            await self.act(arrived)
            del arrived  # They go on now, and nobody else needs their memory.
        await whole_pass()  # The other buckets go on when it has acted.

    def in_order(self, buckets: Sequence[Bucket]) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with what is seen of it, in the model's order; in the buckets' where names are not known."""
        pairs = {
            parameter: seen
            for bucket in buckets
            for parameter, seen in zip(bucket.parameters, self.seen(bucket), strict=True)
        }
        names = self.context.names
        ordered = pairs if names is None else [parameter for parameter in names if parameter in pairs]
        return [(parameter, pairs[parameter]) for parameter in ordered]


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A flat part of a buffer of pairs of real numbers as complex ones, where its parameter is complex."""
    if parameter.is_complex() and not part.is_complex():
        return torch.view_as_complex(part.view(-1, 2))
    return part
