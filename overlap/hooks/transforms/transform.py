"""The base of the transforms that are shipped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, RegistrationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, whole_pass
from overlap.hooks.stage import Plan, Role, Stage, StageContext


class Transform(Stage):
    """A stage that changes or reads local gradients, their mean or new parameters, depending on its place.

    Subclasses use :meth:`inputs`. One object stands in one place of one chain.

    >>> class Halve(Transform):
    ...     async def __call__(self, bucket):
    ...         for tensor in self.inputs(bucket):
    ...             tensor.mul_(0.5)
    >>> chain(AllReduce(), Halve()).register(ddp)
    <chain(AllReduce(), Halve()) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    role = Role.TRANSFORM
    needs_mean = False
    """Whether it is meant for the mean, so that ``ZeroStep`` must reduce before it."""
    edits_gradients = True
    """Whether it changes gradients, so that another backward would add to changed ones."""
    commutes_with_scaling = True
    """Whether a transform of scaled gradients, unscaled afterwards, is the transform of unscaled ones."""

    def __init__(self) -> None:
        self.place: Role | None = None
        """While it is registered, by its inputs: ``TRANSFORM``, this rank's own gradients, before the reducer;
        ``REDUCER``, their mean, after it; ``UPDATE``, new parameters, after an update."""
        self.context: StageContext | None = None
        """The context of its registration."""

    def check_position(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        if self.context is not None or self in before:
            raise RegistrationError(
                f"{self!r} is registered already, and serves one place of one model: make a {type(self).__name__} for "
                "each, or .remove() that registration first"
            )
        self.place = max([Role.TRANSFORM, *(stage.role for stage in before if stage.role <= Role.UPDATE)])

    def attach(self, context: StageContext) -> None:
        if self.place is None:
            raise ConfigurationError(
                f"{self!r} stands inside of another stage: put it into the chain itself, before or after that stage"
            )
        self.context = context

    def detach(self) -> None:
        self.place = self.context = None

    def inputs(self, bucket: Bucket) -> Sequence[Tensor]:
        """The tensors that it acts on, one for each of ``bucket.parameters``, empty if this rank has no part of it.

        Gradients have the shapes of their parameters; after a reduce-scatter they are this rank's flat parts.
        """
        if self.place is Role.UPDATE:
            return bucket.parameters
        if bucket.owned is None:
            return bucket.gradients
        seen = [whole if part is None else part for part, whole in zip(bucket.owned, bucket.gradients, strict=True)]
        # A buffer of complex gradients holds pairs of real numbers.
        return [
            torch.view_as_complex(one.view(-1, 2)) if parameter.is_complex() and not one.is_complex() else one
            for one, parameter in zip(seen, bucket.parameters, strict=True)
        ]

    def rank_unique_inputs(self, bucket: Bucket) -> Sequence[Tensor]:
        """As :meth:`inputs`, for a sum over ranks: gradients that all ranks have whole are empty on all but one."""
        seen = self.inputs(bucket)
        if bucket.group.rank() == 0:
            return seen
        parts = [None] * len(seen) if bucket.owned is None else bucket.owned
        return [one.new_empty(0) if part is None else one for part, one in zip(parts, seen, strict=True)]


class WholePassTransform(Transform, ABC):
    """A transform that acts once in a pass, on all buckets together, when all have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived: list[Bucket] = []

    def before_backward(self, *, is_replay: bool) -> None:
        self._arrived.clear()

    def look(self, bucket: Bucket) -> None:
        """Called with each bucket when it arrives."""

    @abstractmethod
    def act(self, buckets: Sequence[Bucket]) -> Operation | None:
        """Called once in a pass, with all its buckets in their order of arrival; :meth:`finish` is called when the
        operation that it returns, if any, is done."""

    def finish(self) -> None:
        """Called before any of the buckets goes on."""

    def plan(self, bucket: Bucket) -> Plan:
        whole = whole_pass()

        def arrive() -> Operation:
            self._arrived.append(bucket)
            self.look(bucket)
            return whole

        def act() -> Operation | None:
            if not bucket.is_last:
                return None
            arrived, self._arrived = self._arrived, []  # Each bucket's memory may be freed by later stages.
            return self.act(arrived)

        def finish() -> Operation:
            if bucket.is_last:
                self.finish()
            return whole  # The other buckets continue when it has acted.

        return arrive, act, finish
