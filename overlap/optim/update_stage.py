"""What the stages that update have in common: when they do it, and the lifecycle of the gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import check_flag, told
from overlap._torch.device import has_streams
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Role, Stage, StageContext
from overlap.hooks.transforms.clip import Clipping, check_norm_type
from overlap.optim.grad_scaler import skips_by_itself
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.phases import Form, Phase
from overlap.optim.release import GradientRelease, check_releasable
from overlap.optim.skipping import SkippedUpdates

__all__ = ["UpdateStage", "check_unscaled", "without_adding_up"]


class UpdateStage(Stage):
    """An update of a model's parameters, in backward or in ``step()``. See [Note: the update lifecycle].

    Args:
        deferred: update all parameters at once; ``None`` does so only where clipping needs it.
        automatic: backward does everything, and the loop calls no ``step()``.
        clip_grad_norm: the largest global norm of the gradients.
        norm_type: which norm.
        step: what messages call the loop's ``step()``.
        deferred_form: what messages say to use where an update in backward is too early.
        edits: what messages say to use where the loop edits gradients.
        clip: what messages say to use where the loop clips.
        skip: what messages call :meth:`skip_update`.
        adds_up: see :class:`Form`.
        release_gradients: give a bucket's memory back when it is updated. See [Note: gradient release].
    """

    role = Role.UPDATE

    def __init__(
        self,
        *,
        deferred: bool | None,
        automatic: bool,
        clip_grad_norm: float | None,
        norm_type: float,
        step: str,
        deferred_form: str,
        edits: str,
        clip: str,
        skip: str,
        adds_up: bool,
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
        self.releases_gradients = release_gradients
        """Whether ``.grad`` is ``None`` after backward, and gradients take no memory then."""
        self.release: GradientRelease | None = None
        """Gives the memory of gradients back, where this is registered; one for all updates of a model."""
        self.is_automatic = automatic
        self._may_defer = deferred is not False and not (automatic or release_gradients)
        self.may_skip = False
        """Whether a stage before it may have an update left out."""
        self._adds_up = adds_up
        self._transforms: Sequence[Stage] = ()
        self.context: StageContext | None = None
        """Where this is registered."""
        outcome = Phase.STEPPED if automatic else Phase.REDUCED if self.is_deferred else Phase.APPLIED
        self._form = Form(outcome, step, deferred_form, edits=edits, clip=clip, skip=skip, adds_up=adds_up)
        self.lifecycle = UpdateLifecycle(self._form, clears=self.owns_gradient_of, groups=self.groups)

    @abstractmethod
    def owns_gradient_of(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is this update's to clear."""

    @abstractmethod
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The parameter groups whose hyperparameters the update uses."""

    @property
    @abstractmethod
    def optimizer_name(self) -> str:
        """The class of the optimizer that updates, in messages."""

    @property
    @abstractmethod
    def skipped(self) -> SkippedUpdates:
        """Where the loop says that a backward is not this optimizer's."""

    def skip_update(self) -> AbstractContextManager[None]:
        """``with stage.skip_update():`` as the optimizer's method of that name, for a stage that does everything in
        backward: the gradients stay, and the next backward adds to them and updates."""
        return self.skipped.skipping()

    @property
    def leaves_update(self) -> bool:
        """Whether the update of the last backward (or of the one under way) is left to ``step()``."""
        return self.lifecycle.leaves_update

    @property
    def updates_in_step(self) -> bool:
        """Whether the update is left to the loop's ``step()``."""
        return self.is_deferred and not self.is_automatic

    @property
    def updates_after_backward(self) -> bool:
        return self.updates_in_step

    def defer(self) -> None:
        """Before this is registered: leave the update to ``step()`` after all, as with ``deferred=True``. Nothing
        changes where that was ruled out: ``deferred=False``, ``automatic``, ``release_gradients``."""
        if self._may_defer:
            self.is_deferred = True
            self._form = replace(self._form, outcome=Phase.REDUCED)
            self.lifecycle.form = self._form

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        self.may_skip = False  # A stage that may skip says so when it is attached.
        self._transforms = [stage for stage in before if stage.role is Role.TRANSFORM]
        self._form = without_adding_up(replace(self._form, adds_up=self._adds_up), before)
        self.lifecycle.form = self._form

    def check_unscaled(self) -> None:
        """Raises: TrainingLoopError: ``GradScaler`` is used, and a transform has seen scaled gradients."""
        check_unscaled(self._transforms, f"{type(self).__name__}(..., clip_grad_norm=...) clips what is unscaled")

    @property
    @abstractmethod
    def stepped(self) -> Optimizer:
        """The optimizer whose kernels make the update."""

    def check_skippable(self, context: StageContext) -> None:
        if has_streams(context.device) and not skips_by_itself(self.stepped):
            raise UnsupportedError(
                f"on {context.device.type} the host would have to wait to know whether {self!r} is to be skipped, "
                f"unless the kernel of {type(self.stepped).__name__} takes found_inf: use fused=True (Adam, AdamW, SGD "
                "without momentum)"
            )
        self.may_skip = True

    def skip_if(self, found_inf: Tensor) -> None:
        self.lifecycle.veto.found_inf = found_inf

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
        self.context = context
        self.lifecycle.names = context.names or {}
        self.lifecycle.sees_forwards = context.names is not None
        self.lifecycle.is_joining = context.is_joining
        self.lifecycle.tell = context.tell
        self.lifecycle.note_unfinished = context.note_unfinished

    def check_together(self, stages: Sequence[Stage]) -> None:
        form, updates = self._form, [stage for stage in stages if isinstance(stage, UpdateStage)]
        is_alone = len(updates) == 1
        self.lifecycle.form = form if is_alone else replace(form, step=f"{form.step} of {self.optimizer_name}")
        if self.releases_gradients:
            self._release_with([update for update in updates if update.releases_gradients])

    def _release_with(self, updates: Sequence[UpdateStage]) -> None:
        assert self.context is not None, "stages are attached before they are checked together"
        gradients = [update.lifecycle.gradients for update in updates]
        self.release = updates[0].release or GradientRelease(
            self.context,
            is_applied=lambda parameter: any(each.has_applied(parameter) for each in gradients),
            was_unused=lambda parameter: any(each.was_unused(parameter) for each in gradients),
        )

    def detach(self) -> None:
        if self.release is not None:
            self.release.remove()
            self.release = None
        self.lifecycle.on_remove()
        self.context = None

    def before_forward(self) -> None:
        if self.release is not None:
            self.release.before_forward()
        self.lifecycle.on_forward()

    def note_released(self) -> None:
        """Backward is over, and gradients that were applied in it may have been released."""
        if self.release is not None and not self.lifecycle.is_replay:
            self.lifecycle.gradients.note_released(self.release.released)

    def refuse_use_elsewhere(self) -> None:
        """Raises: TrainingLoopError: the memory of a gradient could not be released, since something else uses it."""
        if self.release is not None:
            self.release.refuse_use_elsewhere()

    def before_backward(self, *, is_replay: bool) -> None:
        # A rank without inputs makes the update at once; those with inputs make it in step().
        is_skipped = bool(self.skipped) and not is_replay
        self.lifecycle.on_backward(is_replay=is_replay, outcome=Phase.REDUCED if is_skipped else None)


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
