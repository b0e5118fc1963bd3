"""Averaging as the last stage of a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext
from overlap.hooks.post_local_sgd import PostLocalSGDState
from overlap.optim.local_sgd.averagers import ModelAverager
from overlap.optim.overlapped import OverlappedOptimizer

if TYPE_CHECKING:
    from overlap.optim.local_sgd.controller import LocalSGD

__all__ = ["Average", "Coordination", "CountedState", "UnlessReplayedAlone"]


class Average(Stage):
    """Lets an averager average the model's parameters when backward has made the last update of a step.

    For chains whose update is made in backward; with a deferred update and a loop that calls ``step()``, call the
    averager after it, or use :class:`LocalSGD`::

        chain(AllReduce(), Step(optimizer), Average(PeriodicModelAverager(period=8)))

    Args:
        averager: says when, and over which ranks.

    Issues: what ``averager`` issues, on the training thread, when backward is through.

    Raises:
        ConfigurationError: ``averager`` is none, or the model's parameters are not known at registration.
        TrainingLoopError: under ``Join``, where :class:`LocalSGD` serves.
    """

    role = Role.AVERAGER

    def __init__(self, averager: ModelAverager) -> None:
        if not hasattr(averager, "average_parameters") or isinstance(averager, type):
            raise ConfigurationError(f"Average takes a ModelAverager, got {averager!r}")
        self.averager = averager
        self._parameters: list[Tensor] = []

    @property
    def signature(self) -> str:
        return f"Average({type(self.averager).__name__})"

    def attach(self, context: StageContext) -> None:
        if context.names is None:
            raise ConfigurationError(
                "Average needs the model's parameters, which a hook registered with ddp.register_comm_hook is not "
                "told: use overlap.register"
            )
        self._parameters = list(context.names)

    async def __call__(self, bucket: Bucket) -> None:
        """Nothing to do to a bucket: parameters are averaged when all are updated."""

    def before_backward(self, *, is_replay: bool) -> None:
        if is_replay:
            raise TrainingLoopError("Average does not run under Join: use LocalSGD, with Join([ddp, local])")

    def after_backward(self, *, failed: bool) -> None:
        if not failed:
            self.averager.average_parameters(self._parameters)

    def __repr__(self) -> str:
        return self.signature


class CountedState(PostLocalSGDState):
    """When gradients stop being averaged over all ranks, by the one counter of a :class:`LocalSGD`."""

    def __init__(self, local: LocalSGD, subgroup: object) -> None:
        self._local = local
        self._is_alone = subgroup is None
        super().__init__(
            local.process_group,
            None if subgroup == "machine" else subgroup,  # type: ignore[arg-type]
            local.schedule.start_step,
            post_local_gradient_allreduce=not self._is_alone,
        )

    @property
    def is_local(self) -> bool:
        return self._local.schedule.is_local

    def maybe_increase_iter(self, bucket: object) -> None:
        """Counted by the controller."""


class UnlessReplayedAlone(Stage):
    """An update that a rank without inputs leaves out while it trains alone: it would step on zeros."""

    role = Role.UPDATE

    def __init__(self, update: Stage, state: CountedState) -> None:
        self._update = update
        self._state = state

    @property
    def children(self) -> tuple[Stage, ...]:
        return (self._update,)

    @property
    def signature(self) -> str:
        return self._update.signature

    def attach(self, context: StageContext) -> None:
        if context.finds_unused:
            raise UnsupportedError(
                "with find_unused_parameters or static_graph an update in backward asks all ranks which parameters "
                "were used, at every step: leave update out, so that local.step() updates"
            )

    async def __call__(self, bucket: Bucket) -> None:
        is_alone = self._state.is_local and not self._state.post_local_gradient_allreduce
        if not (bucket.is_replay and is_alone):
            await self._update(bucket)

    def __repr__(self) -> str:
        return repr(self._update)


class Coordination(Stage):
    """Tells a :class:`LocalSGD` what its model does; the averages themselves are made in its ``step``."""

    role = Role.AVERAGER

    def __init__(self, local: LocalSGD) -> None:
        self._local = local
        self.context: StageContext | None = None

    @property
    def signature(self) -> str:
        return repr(self._local)

    def attach(self, context: StageContext) -> None:
        self.context = context

    def detach(self) -> None:
        self._local.on_removed()

    async def __call__(self, bucket: Bucket) -> None:
        """Nothing to do to a bucket: parameters are averaged when all are updated."""

    def before_forward(self) -> None:
        self._local.before_forward()

    def before_backward(self, *, is_replay: bool) -> None:
        self._local.before_backward(is_replay=is_replay)

    def __repr__(self) -> str:
        return f"Average({self._local.schedule.summary})"


def check_update(update: Stage | None, optimizer: Optimizer) -> None:
    """Raises: ConfigurationError: ``update`` cannot serve local SGD with ``optimizer``."""
    if update is None:
        return
    if not isinstance(update, Stage) or update.role is not Role.UPDATE:
        raise ConfigurationError(f"update is a stage that updates, such as Step(optimizer), got {update!r}")
    if update.reduces:
        raise UnsupportedError(
            f"{update!r} shares parameters out among all ranks, who must then agree at every step; use Step(optimizer)"
        )
    if getattr(update, "optimizer", optimizer) is not optimizer or not isinstance(optimizer, OverlappedOptimizer):
        raise ConfigurationError(
            "with update=Step(optimizer), LocalSGD is given the same OverlappedOptimizer: "
            "optimizer = OverlappedOptimizer(torch.optim.SGD(...)); LocalSGD(ddp, optimizer, update=Step(optimizer))"
        )
