"""The update of parameters by the stages of a chain: in backward, at once after it, or in ``step()``.

[Note: an update]

``Step`` updates parameters that every rank holds in full, ``ZeroStep`` the part that a rank owns. Both are this
algorithm, and differ in its primitives alone. A bucket goes through :meth:`Update.__call__`:

- *reduce*: a sharded update that comes first in its chain reduce-scatters the bucket;
- *used*: where DDP looks for unused parameters, the ranks find out which any of them has used;
- the gradients are *left* to ``step()``, *held* until the last bucket (deferred), or *applied* now (interleaved);
- *publish*: a sharded update gathers the new parameters.

:meth:`LoopOptimizer.step` makes the update that stages have left, and ends the step that they made in backward:
*check* that the phases of all models allow it, find the *pending* gradients (those that were not applied yet),
*unscale* and *clip* them, *apply* them unless a scaler or a stage has found one that is not finite, and *publish* the
new parameters. ZeRO without a stage is the same step, of gradients that the loop has averaged.
"""

from __future__ import annotations

import hashlib
import operator
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import check_flag, refuse_capture, told
from overlap._torch.device import has_streams, to_device
from overlap._torch.optimizer import mark_stepped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext, all_reduce, whole_pass
from overlap.hooks.transforms.clip import Clipping, check_norm_type
from overlap.join import Join, Joinable
from overlap.join.joinable import refuse_before_model
from overlap.join.participation import active_join
from overlap.optim.lifecycle import UpdateLifecycle, refusals_told
from overlap.optim.phases import SCALED_IN_BACKWARD, SCALED_UNDER_JOIN, Event, Form, Phase
from overlap.optim.release import GradientRelease, check_releasable
from overlap.optim.scaler import LossScale, Veto, skips_by_itself

__all__ = ["BucketLayout", "LoopOptimizer", "Update", "check_unscaled", "without_adding_up"]


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """The parameters of one bucket that an update serves."""

    bucket: tuple[Tensor, ...]
    parameters: list[Tensor]
    """Those that are updated, in the bucket's order."""
    owned: Mapping[int, Tensor]
    """By ``id``, those whose gradients are the update's to clear."""


L = TypeVar("L", bound=BucketLayout)

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Update(Stage, Generic[L]):
    """Updates a model's parameters, in backward or in ``step()``. See [Note: an update], [Note: the update lifecycle].

    Args:
        optimizer: the one that the loop holds.
        form: its outcome follows from the other arguments.
        deferred: update all parameters at once; ``None`` does so only where clipping needs it.
        automatic: backward does everything, and the loop calls no ``step()``.
        clip_grad_norm: the largest global norm of the gradients.
        norm_type: which norm.
        release_gradients: see [Note: gradient release].
    """

    role = Role.UPDATE
    is_sharded = False
    """Whether a rank updates only its part, and publishes that by a collective."""

    def __init__(
        self,
        optimizer: LoopOptimizer,
        form: Form,
        *,
        deferred: bool | None,
        automatic: bool,
        clip_grad_norm: float | None,
        norm_type: float,
        release_gradients: bool,
    ) -> None:
        check_flag("release_gradients", release_gradients)
        if deferred is not None and not isinstance(deferred, bool):
            raise ConfigurationError(f"deferred is True, False or None, got {told(deferred)}")
        check_norm_type(norm_type)
        self.clipping = None if clip_grad_norm is None else Clipping(clip_grad_norm, norm_type)
        if self.clipping is not None and deferred is False:
            raise ConfigurationError(
                f"clip_grad_norm={clip_grad_norm} needs the norm of all gradients before the first update, which "
                "deferred=False rules out; leave deferred out"
            )
        self.is_deferred = bool(deferred) or self.clipping is not None
        if release_gradients and self.is_deferred:
            asked = "deferred=True" if clip_grad_norm is None else f"clip_grad_norm={clip_grad_norm}"
            raise ConfigurationError(
                f"release_gradients=True gives a gradient back as soon as its bucket is updated, but {asked} needs all "
                f"gradients before the first update; leave one of the two out"
            )
        self.optimizer = optimizer
        self.releases_gradients = release_gradients
        self.release: GradientRelease | None = None
        """Where this is registered; one for all updates of a model."""
        self.is_automatic = automatic
        self._may_defer = deferred is not False and not (automatic or release_gradients)
        self.may_skip = False
        """Whether a stage before it may have an update left out."""
        self.context: StageContext | None = None
        self.finds_unused: bool | None = None
        """Whether DDP looks for unused parameters; ``None`` where that is not known."""
        self._transforms: Sequence[Stage] = ()
        self._adds_up = form.adds_up
        outcome = Phase.STEPPED if automatic else Phase.REDUCED if self.is_deferred else Phase.APPLIED
        self._form = replace(form, outcome=outcome)
        self.lifecycle = UpdateLifecycle(
            self._form, clears=self.owns_gradient_of, groups=lambda: self.optimizer.param_groups
        )
        # By the bucket's index, while the optimizer has this version.
        self._layouts: dict[int, L] = {}
        self._version: object = None
        # Gradients of the last backward that wait for its last bucket, or on a rank that replays for step().
        self.held: dict[Tensor, Tensor] = {}
        # Under PyTorch's Join: by id, what any rank used in the last pass of which that was asked.
        self._used_before: set[int] = set()

    # The primitives.

    @abstractmethod
    def owns_gradient_of(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is this update's to clear."""

    @abstractmethod
    def make_layout(self, bucket: Bucket) -> L:
        """The layout of ``bucket``, which is kept while bucket and optimizer have these parameters."""

    async def reduce(self, bucket: Bucket, layout: L) -> Bucket:
        """Reduce ``bucket``, if the stage is first in its chain; returns it as the update reads it. Sharded only."""
        return bucket

    @abstractmethod
    def gradients(self, bucket: Bucket, layout: L, used: list[bool] | None) -> tuple[Sequence[Tensor], list[Tensor]]:
        """The parameters of ``bucket`` to update, or to clip, and the gradient of each, or this rank's part of it.
        Of the layout's parameters only those are ``used`` that any rank used; all if ``None``."""

    async def leave(self, bucket: Bucket, layout: L, used: list[bool] | None) -> None:
        """Leave the update of ``bucket`` to ``step()``, which goes by ``.grad``. Sharded only."""

    @abstractmethod
    def apply(self, layout: L, parameters: Sequence[Tensor], gradients: list[Tensor]) -> None:
        """Update ``parameters``, one part of a step, and note that their gradients have been applied."""

    @abstractmethod
    async def clip_held(self, held: dict[Tensor, Tensor], bucket: Bucket) -> None:
        """Clip the gradients of all buckets, before the last one is updated."""

    @abstractmethod
    def apply_held(self, held: dict[Tensor, Tensor]) -> None:
        """Make one whole step with the gradients of all buckets."""

    async def publish(self, bucket: Bucket, layout: L) -> None:
        """Bring the new parameters of ``bucket`` to all ranks. Sharded only."""

    @abstractmethod
    def check_backward(self, *, is_replay: bool) -> None:
        """A backward begins. Raises: TrainingLoopError, UnsupportedError: it cannot be updated from."""

    @abstractmethod
    def begin(self) -> None:
        """A backward has begun."""

    def conclude(self) -> None:
        """All buckets are through; may raise."""

    @abstractmethod
    def end_step(self) -> None:
        """All parts of a step have been made in backward, and no ``step()`` follows."""

    @abstractmethod
    def describe_failure(self) -> str | None:
        """How the parameters were left by a backward that failed before all buckets were updated."""

    # A bucket.

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.is_replay and not (bucket.is_mean or self.is_sharded):
            return  # Zeros of a rank that has run out of inputs: other ranks' gradients have not been added to them.
        layout = self.layout_of(bucket)
        if self.is_sharded:
            bucket = await self.reduce(bucket, layout)
        lifecycle = self.lifecycle
        lifecycle.gradients.note_reduced(layout.owned)
        used = None if self.finds_unused is False else await self._used_on_any_rank(bucket, layout.parameters)
        # A rank that replays calls no step(); a sharded update of it is made by a hook of Join, with its collectives.
        if lifecycle.outcome is Phase.REDUCED and (self.is_sharded or not bucket.is_replay):
            if self.is_sharded:
                await self.leave(bucket, layout, used)
            return
        if used is not None:
            lifecycle.gradients.unused.update(map(id, compress(layout.parameters, map(operator.not_, used))))
        parameters, gradients = self.gradients(bucket, layout, used)
        if self.is_deferred:
            await self._update_together(bucket, parameters, gradients)
        else:
            self.apply(layout, parameters, gradients)
        if self.is_sharded:
            await self.publish(bucket, layout)

    def layout_of(self, bucket: Bucket) -> L:
        """The layout of ``bucket``."""
        layout = self._layouts.get(bucket.index)
        if layout is None or layout.bucket is not bucket.parameters:
            layout = self._layouts[bucket.index] = self.make_layout(bucket)
        return layout

    async def _update_together(self, bucket: Bucket, parameters: Sequence[Tensor], gradients: list[Tensor]) -> None:
        self.held.update(zip(parameters, gradients, strict=True))
        await whole_pass()
        if bucket.is_last:
            held, self.held = self.held, {}
            if not self.lifecycle.veto.stops:
                if self.clipping is not None:
                    await self.clip_held(held, bucket)
                self.apply_held(held)
            self.lifecycle.gradients.note_applied(held)
        # Only then may DDP copy gradients out of the other buckets, and ranks gather what was updated.
        await whole_pass()

    async def _used_on_any_rank(self, bucket: Bucket, parameters: Sequence[Tensor]) -> list[bool] | None:
        """Which of ``parameters`` any rank has a gradient for; ``None``: all, or ``step()`` sees it by ``.grad``.

        DDP's bucket holds zeros where no rank has one, and weight decay and momentum must not move that parameter.
        The host waits for the answer.

        Communication: one all-reduce of a byte a parameter where DDP looks for unused parameters.
        """
        join, is_left = active_join(bucket.group), self.leaves_update and not bucket.is_replay
        if not parameters or (is_left and not self.lifecycle.is_joining()):
            return None
        if bucket.is_replay and not (join is not None and join.replays_own_gradients):
            # As DDP does: the parameters that any rank used in the pass before. Under overlap's Join: none.
            former: Collection[int] = () if join is not None else self._used_before
            local = [id(parameter) in former for parameter in parameters]
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
        used = [bool(flag) for flag in flags.tolist()]
        if self.is_sharded:
            self._used_before.difference_update(map(id, parameters))
            self._used_before.update(map(id, compress(parameters, used)))
        return used

    def note_used_gradients(self) -> None:
        """The pass is over, and ``.grad`` tells which parameters were used; a rank that replays may be asked."""
        if not (self.lifecycle.is_replay or self.lifecycle.is_joining()):
            self._used_before = {id(p) for p in self.lifecycle.gradients.reduced.values() if p.grad is not None}

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
        self.held = {}
        self.begin()
        if self.optimizer.version is not self._version:
            self._version = self.optimizer.version
            self._layouts.clear()

    def after_backward(self, *, failed: bool) -> str | None:
        lifecycle = self.lifecycle
        if failed:
            note = None if self.is_deferred or lifecycle.phase is not Phase.BACKWARD else self.describe_failure()
            lifecycle.on_failure()
            return note
        outcome = lifecycle.outcome
        if lifecycle.is_replay and not (self.is_sharded and outcome is Phase.REDUCED):
            outcome = Phase.STEPPED
        try:
            self.conclude()
            if outcome is Phase.STEPPED and not (self.is_deferred or lifecycle.veto.stops):
                self.end_step()
        except BaseException:
            lifecycle.on_failure()
            raise
        if self.release is not None and not lifecycle.is_replay:
            lifecycle.gradients.released = {id(p) for p in self.release.released if self.owns_gradient_of(p)}
        lifecycle.on_reduced(outcome)
        if outcome is Phase.STEPPED:
            mark_stepped(self.optimizer.scheduled)
        return None

    # What the other stages and the loop ask.

    @property
    def stepped(self) -> Optimizer:
        """The optimizer whose kernels make the update."""
        return self.optimizer.stepped

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer.stepped).__name__

    @property
    def leaves_update(self) -> bool:
        return self.lifecycle.outcome is Phase.REDUCED

    @property
    def updates_in_step(self) -> bool:
        """Whether the update is left to the loop's ``step()``."""
        return self.is_deferred and not self.is_automatic

    @property
    def updates_after_backward(self) -> bool:
        return self.updates_in_step

    def skip_update(self) -> AbstractContextManager[None]:
        """As :meth:`LoopOptimizer.skip_update`, for a stage that does everything in backward: the gradients stay, and
        the next backward adds to them and updates."""
        return self.optimizer.skip_update()

    def defer(self) -> None:
        """Before this is registered: defer the update after all, unless ``deferred=False``, ``automatic`` or
        ``release_gradients`` rule that out."""
        if self._may_defer:
            self.is_deferred = True
            self._form = replace(self._form, outcome=Phase.REDUCED)
            self.lifecycle.form = self._form

    def check_unscaled(self) -> None:
        """Raises: TrainingLoopError: ``GradScaler`` is used, and a transform has seen scaled gradients."""
        check_unscaled(self._transforms, f"{type(self).__name__}(..., clip_grad_norm=...) clips what is unscaled")

    def check_skippable(self, context: StageContext) -> None:
        if has_streams(context.device) and not skips_by_itself(self.stepped):
            raise UnsupportedError(
                f"on {context.device.type} the host would have to wait to know whether {self!r} is to be skipped, "
                f"unless the kernel of {self.optimizer_name} takes found_inf: use fused=True (Adam, AdamW, SGD "
                "without momentum)"
            )
        self.may_skip = True

    def skip_if(self, found_inf: Tensor) -> None:
        self.lifecycle.veto.found_inf = found_inf

    # Registration.

    @property
    def as_code(self) -> str:
        options = {
            "deferred": self.is_deferred and self.clipping is None,
            "clip_grad_norm": self.clipping and self.clipping.max_norm,
            "norm_type": self.clipping and self.clipping.norm_type != 2 and self.clipping.norm_type,
            "release_gradients": self.releases_gradients,
        }
        given = [f"{name}={value!r}" for name, value in options.items() if value]
        return f"{type(self).__name__}({', '.join(['zero' if self.is_sharded else 'optimizer', *given])})"

    @property
    def settings(self) -> Mapping[str, str]:
        """The hyperparameters of each group, and which of the model's parameters it has."""
        settings, names = {}, self.lifecycle.names
        for place, group in enumerate(self.optimizer.param_groups):
            members = [names[parameter] for parameter in group["params"] if parameter in names]
            values = {key: _as_text(value) for key, value in group.items() if key not in ("params", "param_names")}
            digest = hashlib.sha256(repr(members).encode()).hexdigest()[:8]
            values["the list of parameters"] = f"{', '.join(members[:3])}, ... ({len(members)}, digest {digest})"
            of_group = f"of group {place} of {self.optimizer_name}"
            settings.update({f"{key} {of_group}": value for key, value in values.items()} if members else {})
        return settings

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        self.may_skip = False  # A stage that may skip says so when it is attached.
        self._transforms = [stage for stage in before if stage.role is Role.TRANSFORM]
        self._form = without_adding_up(replace(self._form, adds_up=self._adds_up), before)
        self.lifecycle.form = self._form

    def attach(self, context: StageContext) -> None:
        if self.context is not None:
            raise RegistrationError(
                f"{self!r} serves a model already; make a {type(self).__name__} for each model, or .remove() that "
                "registration first"
            )
        if context.finds_unused and not self.updates_in_step and has_streams(context.device):
            raise UnsupportedError(
                "with find_unused_parameters or static_graph an update in backward would stop the host to learn which "
                f"parameters no rank used; use {self.lifecycle.form.deferred}"
            )
        if self.releases_gradients:
            check_releasable(context, self)
        self.context, self.finds_unused = context, context.finds_unused
        self.lifecycle.names = context.names or {}
        if context.ddp is not None:
            self.lifecycle.ddp = context.ddp
        self.lifecycle.sees_forwards = context.names is not None
        self.lifecycle.is_joining = context.is_joining
        self.lifecycle.tell = context.tell
        self.lifecycle.note_unfinished = context.note_unfinished

    def check_together(self, stages: Sequence[Stage]) -> None:
        form, updates = self._form, [stage for stage in stages if isinstance(stage, Update)]
        is_alone = len(updates) == 1
        self.lifecycle.form = form if is_alone else replace(form, step=f"{form.step} of {self.optimizer_name}")
        if self.releases_gradients:
            assert self.context is not None, "stages are attached before they are checked together"
            releasing = [update for update in updates if update.releases_gradients]
            gradients = [update.lifecycle.gradients for update in releasing]
            self.release = releasing[0].release or GradientRelease(
                self.context,
                is_applied=lambda parameter: any(id(parameter) in each.applied for each in gradients),
                was_unused=lambda parameter: any(id(parameter) in each.unused for each in gradients),
            )

    def detach(self) -> None:
        if self.release is not None:
            self.release.remove()
            self.release = None
        self.lifecycle.on_remove()
        self._layouts.clear()
        self.context = None


def _as_text(value: Any) -> str:
    """A hyperparameter as text, the same on every rank; of an object that is no plain value its class."""
    value = value.tolist() if isinstance(value, Tensor) else value
    is_plain = all(isinstance(one, _PLAIN) for one in (value if isinstance(value, (list, tuple)) else [value]))
    return repr(value) if is_plain else type(value).__name__


class LoopOptimizer(Optimizer, Joinable):
    """Base of :class:`OverlappedOptimizer` and :class:`ZeroRedundancyOptimizer`. See [Note: an update]."""

    # GradScaler then leaves gradients as they are, always calls step(), and sets found_inf and grad_scale here.
    _step_supports_amp_scaling = True

    updates: list[Update[Any]]
    """The registered stages that update with this optimizer, each for a model of its own."""
    blocks: list[None]
    """An entry for each block of :meth:`skip_update` that the loop is in. Never replaced, as ``updates``: Lightning's
    wrapper of an optimizer has copies of its attributes."""

    @property
    @abstractmethod
    def stepped(self) -> Optimizer:
        """The optimizer whose kernels make the update."""

    @property
    @abstractmethod
    def scheduled(self) -> Optimizer:
        """The one that LR schedulers ask whether it was stepped."""

    @property
    @abstractmethod
    def version(self) -> object:
        """Another object whenever the optimizer has other parameters."""

    # The parts of step().

    def _check_call(self, loss_scale: LossScale, arguments: Mapping[str, Any]) -> None:
        """May refuse the call before anything else."""

    @abstractmethod
    def _gradients(self, pending: list[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        """The parameters to update, and the gradient of each, or this rank's part of it."""

    @abstractmethod
    def _clip_(self, clipping: Clipping, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Tensor:
        """Clip the result of :meth:`_gradients` by the global norm."""

    @abstractmethod
    def _apply(
        self, parameters: Sequence[Tensor], gradients: list[Tensor], veto: Veto, arguments: dict[str, Any]
    ) -> None:
        """Make one whole step with the result of :meth:`_gradients`."""

    def _publish(self, parameters: Sequence[Tensor]) -> None:
        """Bring the new parameters to all ranks."""

    @abstractmethod
    def _finish_backward(self, pending: list[Tensor]) -> None:
        """End a step that was made in backward."""

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Update every parameter that has a gradient and was not updated in backward.

        Args:
            closure: evaluates the model and runs backward; its result is returned.
            **arguments: of the wrapped optimizer's ``step``, where the update is left to this call.

        Raises:
            TrainingLoopError: a gradient has not been reduced, or was changed after an interleaved update had applied
                it (clipping, ``GradScaler``); or the last backward raised.
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture(f"{type(self).__name__}.step()", "call it outside of the capture")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_before_model(self, lambda: any(update.lifecycle.is_joining() for update in self.updates))
        Join.notify_join_context(self)
        with refusals_told(update.lifecycle for update in self.updates):
            self._finish_step(arguments)
        return loss

    def _finish_step(self, arguments: dict[str, Any]) -> None:
        updates, loss_scale = self.updates, LossScale.given_to(self)
        self._check_call(loss_scale, arguments)
        if loss_scale.found_inf is not None:
            self._check_scaled()
        for update in updates:
            update.lifecycle.check_step()
        pending = self._pending()
        for update in updates if pending else ():
            update.lifecycle.check_reduced(pending, allows_zeros=not update.is_sharded)
        phases = [update.lifecycle.phase for update in updates]
        is_over = phases.count(Phase.STEPPED) == len(phases)
        for update in updates:
            update.lifecycle.check_once(is_all=is_over and (update.is_sharded or not pending))
        if Phase.APPLIED in phases:
            self._check_applied(arguments)
        vetoes = [update.lifecycle.veto for update in updates]
        veto = vetoes[0] if len(vetoes) == 1 else Veto.of_any([each.found_inf for each in vetoes])
        is_made = veto.found_inf is None or not veto.stops
        try:
            if is_made and Phase.APPLIED in phases:
                self._finish_backward(pending)
            elif is_made and self._is_due(phases, pending):
                self._update(pending, loss_scale, veto, arguments)
        except BaseException:
            for update in updates:
                update.lifecycle.on_update_failure()
            raise
        mark_stepped(self.scheduled)
        for update in updates:
            update.lifecycle.on_step(pending)
        if is_made and pending:
            self._note_stepped(pending)

    def _is_due(self, phases: Sequence[Phase], pending: list[Tensor]) -> bool:
        """Whether there is something to apply, of models in these phases."""
        return bool(pending) or phases.count(Phase.STEPPED) < max(1, len(phases))

    def _pending(self) -> list[Tensor]:
        """The parameters with a gradient that was not applied yet, in the groups' order."""
        ids: set[int] = set()
        for update in self.updates:
            ids.update(update.lifecycle.gradients.applied)
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None and id(p) not in ids]

    def _check_applied(self, arguments: Mapping[str, Any]) -> None:
        """The update was made in backward; may raise."""

    def _note_stepped(self, pending: list[Tensor]) -> None:
        """``pending`` have been applied."""

    def _check_scaled(self) -> None:
        lifecycles = [update.lifecycle for update in self.updates]
        if any(lifecycle.outcome is not Phase.REDUCED for lifecycle in lifecycles):
            raise TrainingLoopError(SCALED_IN_BACKWARD.format(deferred=lifecycles[0].form.deferred))
        if any(lifecycle.is_joining() for lifecycle in lifecycles):
            raise TrainingLoopError(SCALED_UNDER_JOIN)
        for update in self.updates:
            update.check_unscaled()

    def _update(self, pending: list[Tensor], loss_scale: LossScale, veto: Veto, arguments: dict[str, Any]) -> None:
        if loss_scale.skips_step(self.stepped):
            return
        # One for all: updates of one optimizer are made in one way.
        clipping = next((update.clipping for update in self.updates), None)
        with self._opened():
            parameters, gradients = self._gradients(pending)
            with torch.no_grad():
                loss_scale.unscale_(gradients)
                if clipping is not None:
                    self._clip_(clipping, parameters, gradients)
            verdict = loss_scale.verdict_for(self.stepped)
            self._apply(parameters, gradients, Veto.of_any([veto.found_inf, verdict]), arguments)
        self._publish(parameters)

    def _opened(self) -> AbstractContextManager[None]:
        """Within it ``.grad`` are ordinary tensors, also where this rank has only a part of the mean."""
        return nullcontext()

    # The rest of an optimizer.

    @property
    def is_skipping(self) -> bool:
        """Whether the loop is in a block of :meth:`skip_update`."""
        return bool(self.blocks)

    @contextmanager
    def skip_update(self) -> Iterator[None]:
        """``with optimizer.skip_update():`` for backwards of a loss that is not this optimizer's.

        A backward that begins inside leaves averaged gradients and makes no update, whatever the form:
        :meth:`zero_grad` then discards it, another backward adds to it, :meth:`step` applies it, as with plain DDP.
        For example, for a generator's loss, which goes through the discriminator::

            with optimizer_d.skip_update():
                criterion(discriminator(generator(noise)), real).backward()
            optimizer_g.step()
            optimizer_d.zero_grad()

        Blocks may be nested. Enter them on every rank alike. A sharded update has to be deferred under ``Join``.
        """
        self.blocks.append(None)
        try:
            yield
        finally:
            self.blocks.pop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; between backward and :meth:`step` it discards the backward.

        A registered chain clears what it has applied by itself, so a loop need not call this.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        with refusals_told(update.lifecycle for update in self.updates):
            for update in self.updates:
                update.lifecycle.check(Event.ZERO_GRAD)
            for update in self.updates:
                update.lifecycle.on_zero_grad(set_to_none=set_to_none)
        super().zero_grad(set_to_none)


def check_unscaled(transforms: Sequence[Stage], instead: str) -> None:
    """Called where ``GradScaler`` is used. Raises: TrainingLoopError: a transform has seen scaled gradients."""
    transform = next((stage for stage in transforms if not stage.commutes_with_scaling), None)
    if transform is not None:
        raise TrainingLoopError(
            f"GradScaler multiplies the loss, so {transform!r} has seen scaled gradients in backward: leave it out. "
            f"{instead}, and bfloat16 needs no scaler"
        )


def without_adding_up(form: Form, before: Sequence[Stage]) -> Form:
    """``form`` of an update after the stages ``before``: where one edits gradients, such as a clip, a second backward
    would add to what is edited already, and is refused."""
    return replace(form, adds_up=form.adds_up and not any(stage.edits_gradients for stage in before))
