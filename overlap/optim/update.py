"""The update of parameters by a stage of a chain, in backward; what it leaves to ``step()`` is in ``optimizer.py``.

[Note: an update]

``Step`` updates parameters that every rank holds in full, ``ZeroStep`` the part that a rank owns. Both are this
algorithm, and differ in its primitives alone. A bucket goes through :meth:`Update.__call__`:

- :meth:`Update.reduction`: a sharded update that comes first in its chain reduce-scatters the bucket;
- *used*: where DDP looks for unused parameters, the ranks find out which any of them has used;
- :meth:`Update.steps`: the gradients are *left* to ``step()``, *held* until the last bucket (deferred), or *applied*
  now (interleaved); then a sharded update brings the new parameters to all ranks.

The first and the last are plans, made in each pass, or kept where no rank has to be asked anything.

The loop's :meth:`LoopOptimizer.step` makes the updates that stages have left, and ends those made in backward.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import PLAIN_TYPES, check_flag, digest, short_repr
from overlap._torch.device import has_streams, to_device
from overlap._torch.optimizer import mark_stepped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext, all_reduce, whole_pass
from overlap.hooks.collectives import Operation
from overlap.hooks.stage import Plan, UpdateStage, follow
from overlap.hooks.transforms.transform import Transform
from overlap.join.context import active_join
from overlap.optim.lifecycle import Form, Phase, UpdateLifecycle
from overlap.optim.release import GradientRelease, check_releasable
from overlap.optim.stepper import FoundInf, skips_by_itself


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """The parameters of one bucket that an update serves."""

    bucket: tuple[Tensor, ...]
    parameters: list[Tensor]
    """Those that are updated, in the bucket's order."""
    owned: Mapping[int, Tensor]
    """By ``id``, those whose gradients are the update's to clear."""


L = TypeVar("L", bound=BucketLayout)

_PARTIAL = (
    "some parameters may have been updated by then, and on other ranks others: load a checkpoint before going on, or "
    "use {deferred}, which updates all or none"
)


class UpdatedOptimizer(Optimizer):
    """The optimizer that the loop holds, as far as an update knows it; see :mod:`overlap.optim.optimizer`."""

    blocks: list[None]
    """An entry for each block of :meth:`skip_update` that the loop is in. Never replaced, as ``updates``: Lightning's
    wrapper of an optimizer has copies of its attributes."""

    @property
    @abstractmethod
    def stepped(self) -> Optimizer:
        """The optimizer whose kernels make the update."""

    @property
    @abstractmethod
    def version(self) -> object:
        """Another object whenever the optimizer has other parameters."""

    @abstractmethod
    def skip_update(self) -> AbstractContextManager[None]:
        """Around backwards of a loss that is not this optimizer's."""


class Update(UpdateStage, Generic[L]):
    """Updates a model's parameters, in backward or in ``step()``. See [Note: an update], [Note: the update lifecycle].

    Args:
        optimizer: the one that the loop holds.
        form: of an interleaved update; it is deferred where the other arguments ask for that.
        deferred: update all parameters at once; ``None``: where an integration asks for it.
        release_gradients: see [Note: gradient release].
    """

    is_sharded = False
    """Whether a rank updates only its part, and gathers the others' by a collective."""

    def __init__(
        self,
        optimizer: UpdatedOptimizer,
        form: Form,
        *,
        deferred: bool | None,
        release_gradients: bool,
    ) -> None:
        check_flag("release_gradients", release_gradients)
        if deferred is not None and not isinstance(deferred, bool):
            raise ConfigurationError(f"deferred is True, False or None, got {short_repr(deferred)}")
        if release_gradients and deferred:
            raise ConfigurationError(
                "release_gradients=True gives a gradient back as soon as its bucket is updated, but deferred=True "
                "needs all gradients before the first update; leave one of the two out"
            )
        self.optimizer = optimizer
        self.releases_gradients = release_gradients
        self.release: GradientRelease | None = None
        """Where this is registered; one for all updates of a model."""
        self._may_defer = deferred is not False and not (form.is_automatic or release_gradients)
        self.may_skip = False
        """Whether a stage before it may have an update left out."""
        self.context: StageContext | None = None
        self.finds_unused: bool | None = None
        """Whether DDP looks for unused parameters; ``None`` where that is not known."""
        self.before: Sequence[Stage] = ()
        """The stages before it in its chain."""
        self._transform_after: Stage | None = None
        form = replace(form, is_deferred=bool(deferred))
        self.lifecycle = UpdateLifecycle(form, clears=self.owns_gradient_of, optimizer=optimizer)
        # By the bucket's index, while the optimizer has this version.
        self._layouts: dict[int, L] = {}
        self._version: object = None
        # The outcome of the pass in which plans were made.
        self._planned_outcome: Phase | None = None
        # Gradients of the last backward that wait for its last bucket, or on a rank that replays for step().
        self.held: dict[Tensor, Tensor] = {}
        # Whether another update follows in the chain.
        self._has_next = False

    # The primitives.

    @abstractmethod
    def owns_gradient_of(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is this update's to clear."""

    @abstractmethod
    def make_layout(self, bucket: Bucket) -> L:
        """The layout of ``bucket``, which is kept while bucket and optimizer have these parameters."""

    def reduction(self, bucket: Bucket, layout: L) -> Plan:
        """Reduce ``bucket``, if the stage is first in its chain. Sharded only."""
        return ()

    @abstractmethod
    def to_update(self, bucket: Bucket, layout: L, used: list[bool] | None) -> tuple[Sequence[Tensor], list[Tensor]]:
        """The parameters of ``bucket`` to update, here or in ``step()``, and the gradient of each, or this rank's part
        of it. Of the layout's parameters only those are ``used`` that any rank used; all if ``None``."""

    def leaving(self, bucket: Bucket, layout: L, used: list[bool] | None) -> Plan:
        """Leave the update of ``bucket`` to ``step()``, which goes by ``.grad``; here without communication. Another
        rank may make it in its replay, so collectives of later updates wait here for the same as there."""
        return (whole_pass, whole_pass) if self.form.is_deferred and self._has_next else ()

    @abstractmethod
    def applying(self, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Callable[[], None]:
        """What updates ``parameters``, one part of a step; kept while the optimizer has these parameters."""

    @abstractmethod
    def apply_held(self, held: dict[Tensor, Tensor]) -> None:
        """Make one whole step with the gradients of all buckets."""

    def check_backward(self, *, is_replay: bool) -> None:
        """A backward begins. Raises: TrainingLoopError, UnsupportedError: it cannot be updated from."""
        assert self.context is not None, "backward runs while the stage is attached"
        if self.finds_unused and self.lifecycle.is_joining() and active_join(self.context.group) is None:
            raise UnsupportedError(
                "PyTorch's Join with find_unused_parameters does not tell a rank without inputs which parameters the "
                "others used; use `with overlap.Join([ddp, optimizer])`"
            )

    @abstractmethod
    def begin(self) -> None:
        """A backward has begun."""

    def conclude(self) -> None:
        """All buckets are through; may raise."""

    @abstractmethod
    def end_step(self) -> None:
        """All parts of a step have been made in backward, and no ``step()`` follows."""

    # A bucket.

    async def __call__(self, bucket: Bucket) -> None:
        layout = self.layout_of(bucket)
        if bucket.is_replay and not (bucket.is_mean or self.is_sharded):
            # Zeros of a rank that has run out of inputs: other ranks' gradients have not been added to them.
            await follow(self.leaving(bucket, layout, None))
            return
        await follow(self.reduction(bucket, layout))
        used = None if self.finds_unused is False else await self._used_on_any_rank(bucket, layout.parameters)
        await follow(self.steps(bucket, layout, used))

    def plan(self, bucket: Bucket) -> Plan | None:
        if self.finds_unused is not False:
            return None  # The ranks are asked.
        layout = self.layout_of(bucket)
        return *self.reduction(bucket, layout), *self.steps(bucket, layout, None)

    def steps(self, bucket: Bucket, layout: L, used: list[bool] | None) -> Plan:
        """The update of ``bucket``, which is reduced, in passes with the outcome of the one under way."""
        of_pass, is_last = self.lifecycle.gradients, bucket.is_last

        def note() -> None:
            of_pass.reduced.update(layout.owned)

        # A rank that replays calls no step(); a sharded update of it is made by a hook of Join, with its collectives.
        if self.leaves_update and (self.is_sharded or not bucket.is_replay):
            return note, *self.leaving(bucket, layout, used)
        if used is not None:
            of_pass.unused.update(map(id, compress(layout.parameters, map(operator.not_, used))))
        parameters, gradients = self.to_update(bucket, layout, used)

        def hold() -> Operation:
            of_pass.reduced.update(layout.owned)
            self.held.update(zip(parameters, gradients, strict=True))
            return whole_pass()

        def update_held() -> Operation:
            if is_last:
                held, self.held = self.held, {}
                if not self.lifecycle.verdict.skips(self.stepped):
                    self.apply_held(held)
                of_pass.note_applied(held)
            # Only then may DDP copy gradients out of the other buckets, and ranks gather the new parameters.
            return whole_pass()

        if self.form.is_deferred:
            return hold, update_held
        apply = self.applying(parameters, gradients)

        # It runs when the next bucket arrives, or at the end of backward, as all that follows a collective does: not
        # when its own reduction is complete.
        def update() -> None:
            of_pass.reduced.update(layout.owned)
            apply()

        return (update,)

    def layout_of(self, bucket: Bucket) -> L:
        """The layout of ``bucket``."""
        layout = self._layouts.get(bucket.index)
        if layout is None or layout.bucket is not bucket.parameters:
            layout = self._layouts[bucket.index] = self.make_layout(bucket)
        return layout

    async def _used_on_any_rank(self, bucket: Bucket, parameters: Sequence[Tensor]) -> list[bool] | None:
        """Which of ``parameters`` any rank has a gradient for; ``None``: all, or ``step()`` sees it by ``.grad``.

        DDP's bucket holds zeros where no rank has one, and weight decay and momentum must not move that parameter.
        The host waits for the answer.

        Communication: one all-reduce of a byte a parameter where DDP looks for unused parameters.
        """
        join, is_left = active_join(bucket.group), self.leaves_update and not bucket.is_replay
        if not parameters or (is_left and not self.lifecycle.is_joining()):
            return None
        # Join's adapter sets it for the replay of a rank that has gradients of its own, from under no_sync().
        if bucket.is_replay and not (join is not None and join.replays_own_gradients):
            local = [False] * len(parameters)
        else:
            local = [parameter.grad is not None for parameter in parameters]
        if self.finds_unused is None:
            if not bucket.is_replay and not all(local):
                raise UnsupportedError(
                    "a parameter has no gradient on this rank, and a hook registered with ddp.register_comm_hook is "
                    "not told whether that is meant; register with overlap.register(ddp, hook)"
                )
            return None
        flags = to_device(torch.tensor(local, dtype=torch.uint8, device="cpu"), bucket.buffer.device)
        await all_reduce(flags, op=dist.ReduceOp.MAX, group=bucket.group)
        if is_left and join is not None:
            return None  # Only ranks that replay have asked, and the host need not wait.
        return [bool(flag) for flag in flags.tolist()]

    # A pass.

    def before_forward(self) -> None:
        if self.release is not None:
            self.release.before_forward()
        self.lifecycle.on_forward()

    def before_backward(self, *, is_replay: bool) -> None:
        self.check_backward(is_replay=is_replay)
        # A rank without inputs makes the update at once; those with inputs make it in step().
        is_skipped = bool(self.optimizer.blocks) and not is_replay
        self.lifecycle.on_backward(is_replay=is_replay, outcome=Phase.REDUCED if is_skipped else None)
        if is_skipped and self._transform_after is not None:
            raise TrainingLoopError(
                f"skip_update() leaves the update of {self!r} to step(), so {self._transform_after!r} after it would "
                "see old parameters: leave that stage out, and do the same by hand after step()"
            )
        self.held = {}
        self.begin()
        version, outcome = self.optimizer.version, self.lifecycle.outcome
        if version is not self._version:
            self._layouts.clear()
        if version is not self._version or outcome is not self._planned_outcome:
            self._version, self._planned_outcome = version, outcome
            assert self.context is not None, "backward runs while the stage is attached"
            self.context.replan()

    def after_backward(self, *, failed: bool) -> str | None:
        lifecycle = self.lifecycle
        if failed:
            may_be_partial = not self.form.is_deferred and (self.is_sharded or bool(lifecycle.gradients.applied))
            is_partial = may_be_partial and lifecycle.phase is Phase.BACKWARD
            lifecycle.on_failure()
            return _PARTIAL.format(deferred=self.form.deferred_code) if is_partial else None
        outcome = lifecycle.outcome
        if lifecycle.is_replay and not (self.is_sharded and outcome is Phase.REDUCED):
            outcome = Phase.STEPPED
        try:
            self.conclude()
            if outcome is Phase.STEPPED and not (self.form.is_deferred or lifecycle.verdict.skips(self.stepped)):
                self.end_step()
        except BaseException:
            lifecycle.on_failure()
            raise
        lifecycle.on_reduced(outcome)
        if outcome is Phase.STEPPED:
            mark_stepped(self.optimizer)
        return None

    # What the other stages and the loop ask.

    @property
    def stepped(self) -> Optimizer:
        """The optimizer whose kernels make the update."""
        return self.optimizer.stepped

    @property
    def form(self) -> Form:
        """When and how the update is made, as the stage stands in its chain."""
        return self.lifecycle.form

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer.stepped).__name__

    @property
    def leaves_update(self) -> bool:
        """Whether the update of the backward under way is left to the loop's ``step()``: of a deferred one, and of any
        that began inside of ``skip_update()``."""
        return self.lifecycle.outcome is Phase.REDUCED

    @property
    def updates_after_backward(self) -> bool:
        return self.form.leads_to is Phase.REDUCED

    def skip_update(self) -> AbstractContextManager[None]:
        """As :meth:`LoopOptimizer.skip_update`, for a stage that does everything in backward: the gradients stay, and
        the next backward adds to them and updates."""
        return self.optimizer.skip_update()

    def defer(self) -> None:
        """Before this is registered: defer the update after all, unless ``deferred=False``, ``automatic`` or
        ``release_gradients`` rule that out."""
        if self._may_defer:
            self.lifecycle.form = replace(self.form, is_deferred=True)
            self.lifecycle.outcome = self.form.leads_to

    def check_skippable(self, context: StageContext) -> None:
        if has_streams(context.device) and not skips_by_itself(self.stepped):
            raise UnsupportedError(
                f"on {context.device.type} the host would have to wait to know whether {self!r} is to be skipped, "
                f"unless the kernel of {self.optimizer_name} takes found_inf: use fused=True (Adam, AdamW, SGD "
                "without momentum)"
            )
        self.may_skip = True

    def skip_if(self, found_inf: Tensor) -> None:
        self.lifecycle.verdict = FoundInf(found_inf)

    # Registration.

    @property
    def as_code(self) -> str:
        options = {"deferred": self.form.is_deferred, "release_gradients": self.releases_gradients}
        given = [f"{name}=True" for name, is_given in options.items() if is_given]
        return f"{type(self).__name__}({', '.join(['zero' if self.is_sharded else 'optimizer', *given])})"

    @property
    def settings(self) -> Mapping[str, str]:
        """The hyperparameters of each group, and which of the model's parameters it has."""
        settings, names = {}, self.lifecycle.names
        for place, group in enumerate(self.optimizer.param_groups):
            members = [names[parameter] for parameter in group["params"] if parameter in names]
            values = {key: _as_text(value) for key, value in group.items() if key not in ("params", "param_names")}
            shown = f"{', '.join(members[:3])}, ... ({len(members)}, digest {digest(members)})"
            values["the list of parameters"] = shown
            of_group = f"of group {place} of {self.optimizer_name}"
            settings.update({f"{key} {of_group}": value for key, value in values.items()} if members else {})
        return settings

    def check_position(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        self.may_skip = False  # A stage that may skip says so when it is attached.
        self.before = before
        self._transform_after = next((stage for stage in after if stage.role is Role.TRANSFORM), None)

    def attach(self, context: StageContext) -> None:
        if self.context is not None:
            raise RegistrationError(
                f"{self!r} serves a model already; make a {type(self).__name__} for each model, or .remove() that "
                "registration first"
            )
        if context.finds_unused and self.form.leads_to is not Phase.REDUCED and has_streams(context.device):
            raise UnsupportedError(
                "with find_unused_parameters or static_graph an update in backward would stop the host to learn which "
                f"parameters no rank used; use {self.form.deferred_code}"
            )
        if self.releases_gradients:
            check_releasable(context, self)
        self.context, self.finds_unused = context, context.finds_unused
        self.lifecycle.attach(context)

    def check_together(self, stages: Sequence[Stage]) -> None:
        updates = [stage for stage in stages if isinstance(stage, Update)]
        form = replace(self.form, owner=self.optimizer_name if len(updates) > 1 else "")
        self.lifecycle.form = in_its_chain(form, self.before)
        self.lifecycle.others = [update.lifecycle for update in updates if update is not self]
        self._has_next = self is not updates[-1]
        if self.releases_gradients:
            assert self.context is not None, "stages are attached before they are checked together"
            releasing = [update for update in updates if update.releases_gradients]
            gradients = [update.lifecycle.gradients for update in releasing]
            self.release = releasing[0].release or GradientRelease(self.context, gradients)

    def detach(self) -> None:
        if self.release is not None:
            self.release.remove()
            self.release = None
        self.lifecycle.on_remove()
        self._layouts.clear()
        self.context = None


def _as_text(value: Any) -> str:
    """A hyperparameter as text, the same on every rank; the class's name for an object that is not a plain value."""
    value = value.tolist() if isinstance(value, Tensor) else value
    is_plain = all(isinstance(one, PLAIN_TYPES) for one in (value if isinstance(value, (list, tuple)) else [value]))
    return repr(value) if is_plain else type(value).__name__


def check_unscaled(transforms: Sequence[Stage]) -> None:
    """Called where ``GradScaler`` is used. Raises: TrainingLoopError: a transform has seen scaled gradients."""
    for stage in transforms:
        if isinstance(stage, Transform) and not stage.commutes_with_scaling:
            raise TrainingLoopError(
                f"GradScaler multiplies the loss, so {stage!r} has seen scaled gradients in backward: leave it out, "
                "and clip in the loop, after scaler.unscale_(optimizer); or use bfloat16, which needs no scaler"
            )


def in_its_chain(form: Form, before: Sequence[Stage]) -> Form:
    """``form`` of an update after the stages ``before``: where one edits gradients, such as a clip, a second backward
    would add to what is edited already, and is refused."""
    transforms = [stage for stage in before if stage.role is Role.TRANSFORM]
    edits = any(not isinstance(stage, Transform) or stage.edits_gradients for stage in transforms)
    return replace(form, adds_up=not edits)
