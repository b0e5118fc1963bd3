"""Stages at the end of a chain: the averager, and what tells a LocalSGD of its model's passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import as_list, told
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, SkipNonFinite, Stage, StageContext
from overlap.hooks.adapters import stage_from
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.local_sgd.several import SeveralOptimizers, name_of
from overlap.optim.local_sgd.torch_names import ModelAverager
from overlap.optim.optimizer import OverlappedOptimizer
from overlap.optim.phases import Phase
from overlap.optim.update import without_adding_up

__all__ = ["Average", "LocalSGDStage", "check_transforms", "check_update"]


class Average(Stage):
    """Lets an averager average the model's parameters when backward has made the last update of a step.

    For chains whose update is made in backward; with a deferred update and a loop that calls ``step()``, call the
    averager after it, or use :class:`LocalSGD`::

        chain(AllReduce(), Step(optimizer), Average(PeriodicModelAverager(period=8)))

    Args:
        averager: says when, and over which ranks.

    Issues: what ``averager`` issues, on the training thread, at the end of backward.

    Raises:
        ConfigurationError: ``averager`` is not a ModelAverager, or (at registration) the model's parameters are not
            known.
        TrainingLoopError: in ``backward``, under ``Join``, which needs :class:`LocalSGD`.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=2)
    >>> update = Step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    >>> chain(PostLocal(PostLocalSGDState(None, None, start_localSGD_iter=2)), update, Average(averager)).register(ddp)
    <chain(PostLocal(AllReduce(), from step 2), Step(SGD, interleaved), Average(PeriodicModelAverager)) registered>
    """

    role = Role.AVERAGER

    def __init__(self, averager: ModelAverager) -> None:
        if not hasattr(averager, "average_parameters") or isinstance(averager, type):
            raise ConfigurationError(f"Average takes a ModelAverager, got {told(averager)}")
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

    def state_dict(self) -> dict[str, Any]:
        """The averager's."""
        if isinstance(self.averager, ModelAverager):
            return self.averager.state_dict()
        return {"step": self.averager.step} if hasattr(self.averager, "step") else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; nothing leaves the averager as it is."""
        if "step" not in state_dict:
            return
        if isinstance(self.averager, ModelAverager):
            self.averager.load_state_dict(state_dict)
        else:
            self.averager.step = state_dict["step"]

    def __repr__(self) -> str:
        return self.signature


class LocalSGDStage(Stage):
    """Tells a :class:`LocalSGD` of its model's forwards and backwards; averages are made in ``LocalSGD.step``.

    Args:
        signature: the settings that must be the same on every rank.
        summary: the schedule and the options, for ``repr``.
        lifecycle: of the update that ``LocalSGD.step`` makes; ``None`` where a stage updates in backward.
        before_forward: called before each forward that records gradients.
        before_backward: called with ``is_replay`` when the first bucket of a pass arrives.
        on_detach: called when the stage is removed, while ``context`` is still there.
    """

    role = Role.AVERAGER

    def __init__(
        self,
        *,
        signature: str,
        summary: str,
        lifecycle: UpdateLifecycle | None,
        before_forward: Callable[[], None],
        before_backward: Callable[[bool], None],
        on_detach: Callable[[], None],
    ) -> None:
        self._signature = signature
        self._summary = summary
        self._lifecycle = lifecycle
        self._before_forward = before_forward
        self._before_backward = before_backward
        self._on_detach = on_detach
        self._context: StageContext | None = None
        self.holds_mean = False
        """Whether the mean of the pass under way is to be kept in ``held``: DDP sets no ``.grad`` in a replay."""
        self.held: dict[Tensor, Tensor] = {}

    @property
    def context(self) -> StageContext:
        """Where it is registered.

        Raises:
            RegistrationError: it was removed.
        """
        if self._context is None:
            raise RegistrationError("this LocalSGD was removed from its model; make another one")
        return self._context

    @property
    def lifecycle(self) -> UpdateLifecycle | None:
        """Of the update that ``LocalSGD.step`` makes; ``None`` where a stage updates in backward."""
        return self._lifecycle

    @property
    def signature(self) -> str:
        return self._signature

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        if self._lifecycle is not None:
            self._lifecycle.form = without_adding_up(self._lifecycle.form, before)

    def attach(self, context: StageContext) -> None:
        self._context = context
        if self._lifecycle is not None:
            self._lifecycle.names = context.names or {}
            self._lifecycle.sees_forwards = context.names is not None
            self._lifecycle.tell = context.tell

    def detach(self) -> None:
        if self._lifecycle is not None:
            self._lifecycle.on_remove()
        self._on_detach()
        self._context = None

    async def __call__(self, bucket: Bucket) -> None:
        """Nothing to do to a bucket: parameters are averaged when all are updated."""
        if self.holds_mean:
            self.held.update(zip(bucket.parameters, [each.clone() for each in bucket.gradients], strict=True))
        if self._lifecycle is not None:
            self._lifecycle.gradients.note_reduced({id(parameter): parameter for parameter in bucket.parameters})

    def before_forward(self) -> None:
        if self._lifecycle is not None:
            self._lifecycle.on_forward()
        self._before_forward()

    def before_backward(self, *, is_replay: bool) -> None:
        self._before_backward(is_replay)
        if self._lifecycle is not None:
            self._lifecycle.on_backward(is_replay=is_replay)

    def after_backward(self, *, failed: bool) -> None:
        if self._lifecycle is None:
            return
        if failed:
            self._lifecycle.on_failure()
        else:
            self._lifecycle.on_reduced(Phase.STEPPED if self._lifecycle.is_replay else None)

    def __repr__(self) -> str:
        return f"Average({self._summary})"


def check_transforms(transforms: Sequence[Stage | Callable[..., Any]]) -> list[Stage]:
    """``transforms`` as stages.

    Raises:
        ConfigurationError: one is not a transform.
        UnsupportedError: one leaves out steps, which ranks would no longer count alike.
    """
    if (given := as_list(transforms)) is None:
        raise ConfigurationError(f"transforms is a list of stages, as in [ClipGradNorm(1.0)], got {told(transforms)}")
    stages = [stage_from(one) for one in given]
    for stage in stages:
        if stage.role is not Role.TRANSFORM:
            raise ConfigurationError(
                f"transforms are stages that neither reduce nor update, got {stage!r}: give a reducer as reducer=, an "
                "update as update="
            )
        if isinstance(stage, SkipNonFinite):
            raise UnsupportedError(
                f"{stage!r} skips the step on all ranks, but ranks that train alone do not communicate: leave it "
                "out, or look at .grad before local.step()"
            )
    return stages


def check_update(update: Stage | None, optimizer: Optimizer, ddp: DistributedDataParallel) -> None:
    """Check that ``update`` can be in the chain of a :class:`LocalSGD` of ``optimizer``.

    Raises:
        ConfigurationError: it is not an update of this optimizer.
        UnsupportedError: it needs something of other ranks at every step.
    """
    if update is None:
        return
    if not isinstance(update, Stage) or update.role is not Role.UPDATE:
        raise ConfigurationError(f"update must be a stage that updates, such as Step(optimizer), got {update!r}")
    if update.reduces:
        raise UnsupportedError(
            f"{update!r} divides parameters among all ranks, which must then agree at every step; use Step(optimizer)"
        )
    if isinstance(optimizer, SeveralOptimizers):
        raise UnsupportedError(
            f"update takes one optimizer, and LocalSGD was given {name_of(optimizer)}: leave update out, so that "
            "local.step() steps them"
        )
    if getattr(update, "optimizer", optimizer) is not optimizer or not isinstance(optimizer, OverlappedOptimizer):
        raise ConfigurationError(
            "with update=Step(optimizer), LocalSGD must be given the same OverlappedOptimizer: "
            "optimizer = OverlappedOptimizer(torch.optim.SGD(...)); LocalSGD(ddp, optimizer, update=Step(optimizer))"
        )
    if ddp.find_unused_parameters or ddp.static_graph:
        raise UnsupportedError(
            "with find_unused_parameters or static_graph an update in backward asks all ranks which parameters "
            "were used, at every step: leave update out, so that local.step() updates"
        )
