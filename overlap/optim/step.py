"""The update of replicated parameters, in backward or after it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, told
from overlap._torch import classes
from overlap._torch.optimizer import mark_stepped, unwrapped
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.hooks import Bucket, Role, Stage, StageContext
from overlap.optim.deferred import DeferredUpdate
from overlap.optim.functional import FunctionalOptimizer
from overlap.optim.overlapped import OverlappedOptimizer
from overlap.optim.phases import Phase
from overlap.optim.share import Share, Shares
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.step_checks import check_coverage, check_in_backward, check_params, instead_of_step
from overlap.optim.step_guard import StepGuard, check_one_model, guarded_by
from overlap.optim.unused import used_on_any_rank
from overlap.optim.update_stage import UpdateStage

__all__ = ["Step"]

_DEFERRED = "Step(optimizer, deferred=True)"
_DEFERRED_AUTOMATIC = f"an OverlappedOptimizer and {_DEFERRED}"


class Step(UpdateStage):
    """Updates parameters with the averaged gradients of their bucket, on every rank alike.

    *Interleaved* (default): each bucket's parameters are updated as soon as it is reduced, while backward still
    computes the next ones. *Deferred* (``deferred=True``, or ``clip_grad_norm``): all are updated at once, when all
    gradients are there. Clipping by the global norm and ``GradScaler`` need that, and so do optimizers that have a step
    pre-hook, or that are neither known nor declared (see :func:`overlap.declare`).

    Given an :class:`OverlappedOptimizer`, the loop calls its ``step()``: after each backward where updates are
    interleaved, after one or more where they are deferred. A deferred update is made there. Given a plain or a
    functional optimizer, the stage does everything in backward (the deferred update with the last bucket), and the loop
    calls no ``step()``.

    After backward ``.grad`` holds the averaged gradient; it is cleared before the model's next forward. Where the
    update was made in backward, it is read-only until ``step()`` (in the automatic form until the next forward): an
    edit, such as a clip, raises ``TrainingLoopError`` at its line.

    Args:
        optimizer: what updates; it may have parameters that the model does not have. Of Accelerate's and Lightning's
            wrappers the optimizer inside is taken.
        params: update these alone in backward; the others keep their averaged ``.grad`` (an ``OverlappedOptimizer``
            updates its own among them in ``step()``).
        deferred: update all parameters at once; by default only where clipping needs it.
        clip_grad_norm: scale the averaged gradients that this update applies to at most this global norm first;
            implies ``deferred``. Where the optimizer has all parameters, that is
            ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip_grad_norm)`` bit for bit, whatever its groups: norms
            are summed in the model's order. Of an optimizer with a part of them only that part counts (for the whole
            model use :class:`ClipGradNorm`); one that serves several models sums in the order in which these were
            registered, and parameters outside of the models (all, in a hook registered with
            ``ddp.register_comm_hook``) come last, in the groups' order.
        norm_type: which norm.
        release_gradients: free a bucket's memory as soon as it is updated, and allocate it again for its next gradient,
            so that gradients hardly add to the peak. ``.grad`` cannot be read after backward. Needs
            ``DistributedDataParallel(..., gradient_as_bucket_view=True)``; see ``docs/memory.md``.

    Issues: nothing; where DDP looks for unused parameters and the update is interleaved, one all-reduce of a byte a
    parameter, because a parameter that no rank used must not be updated (weight decay and momentum would move it).

    Raises:
        ConfigurationError: an argument is out of range, or (at registration) optimizer and model do not fit.
        UnsupportedError: at registration, if the update is made in backward and the optimizer is neither known nor
            declared, or something must run before its step; in ``backward``, if buckets leave different values in its
            groups.
        RegistrationError: another model has a stage that updates the same parameters with this optimizer.
        TrainingLoopError: in ``backward``, when an interleaved update has not been followed by ``step()``, or when
            something else refers to a gradient that is to be released; and as described in ``docs/lifecycle.md``.

    >>> layer = torch.nn.Linear(2, 2)
    >>> Step(torch.optim.SGD(layer.parameters(), lr=0.1), clip_grad_norm=1.0)
    Step(SGD, deferred, clip_grad_norm=1.0)
    """

    def __init__(
        self,
        optimizer: Optimizer | FunctionalOptimizer,
        *,
        params: Iterable[Tensor] | None = None,
        deferred: bool | None = None,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        release_gradients: bool = False,
    ) -> None:
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, classes.ZeroRedundancyOptimizer):
            raise ConfigurationError(
                "Step updates on every rank alike; for a ZeroRedundancyOptimizer use ZeroStep(zero)"
            )
        automatic = not isinstance(optimizer, OverlappedOptimizer)
        super().__init__(
            deferred=deferred,
            automatic=automatic,
            clip_grad_norm=clip_grad_norm,
            norm_type=norm_type,
            step="optimizer.step()",
            deferred_form=(deferred_form := _DEFERRED_AUTOMATIC if automatic else _DEFERRED),
            edits=deferred_form,
            clip="Step(optimizer, clip_grad_norm=max_norm)",
            skip="stage.skip_update()" if automatic else "optimizer.skip_update()",
            adds_up=True,
            release_gradients=release_gradients,
        )
        self._functional = optimizer if isinstance(optimizer, FunctionalOptimizer) else None
        plain = optimizer.optimizer if isinstance(optimizer, FunctionalOptimizer) else optimizer
        self.optimizer = plain if isinstance(plain, OverlappedOptimizer) else OverlappedOptimizer(plain)
        self._only = None if params is None else _by_id(params)
        check_params(self._only, self.optimizer, is_deferred=self.is_deferred)
        self._may_defer = self._may_defer and self._only is None
        self._guard: torch.utils.hooks.RemovableHandle | None = None
        self._shares = Shares(self._updates, self.owns_gradient_of)
        self._finds_unused: bool | None = None
        self._deferred = DeferredUpdate(self.optimizer, self.lifecycle, clipping=self.clipping, is_automatic=automatic)

    @property
    def stepped(self) -> Optimizer:
        return self.optimizer.optimizer

    @property
    def optimizer_name(self) -> str:
        return type(self.optimizer.optimizer).__name__

    @property
    def signature(self) -> str:
        return repr(self)

    @property
    def _adopts_parameters(self) -> bool:
        """Whether the functional optimizer was given no parameters, and takes those that come."""
        return self._functional is not None and self._functional.adopts

    def attach(self, context: StageContext) -> None:
        if not self._adopts_parameters:
            check_coverage(context, self.optimizer, is_automatic=self.is_automatic, updates_all=self._only is None)
        self.optimizer.registered_updates.check_same_way(self)
        check_one_model(self.optimizer.optimizer, context)
        if not self.updates_in_step:
            check_in_backward(self.optimizer, is_deferred=self.is_deferred)
        super().attach(context)
        if self._functional is not None and self._adopts_parameters and context.names is not None:
            # In the model's order, which is that of its state, and not as buckets bring them.
            self._functional.adopt(parameter for parameter in context.names if parameter.requires_grad)
            self.optimizer.stepper.refresh()
        self.optimizer.registered_updates.adopt(self)
        self._finds_unused = context.finds_unused
        if self._functional is None:
            through = None if self.is_automatic else self.optimizer
            guard = StepGuard(self, instead_of_step(is_automatic=self.is_automatic), through=through)
            self._guard = guarded_by(guard, self.optimizer.optimizer)

    def detach(self) -> None:
        super().detach()
        self._shares.forget()
        self.optimizer.registered_updates.release(self)
        if self._guard is not None:
            self._guard.remove()

    def owns_gradient_of(self, parameter: Tensor) -> bool:
        return self._updates(parameter) or (not self.is_automatic and self.optimizer.stepper.covers(parameter))

    @property
    def updated(self) -> Sequence[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if self.owns_gradient_of(p)]

    def check_together(self, stages: Sequence[Stage]) -> None:
        super().check_together(stages)
        others = [stage for stage in stages if stage.role is Role.UPDATE and stage is not self]
        if others and self._adopts_parameters:
            raise ConfigurationError(
                f"{self!r} has no parameters yet and takes all that the model has, those of {others[0]!r}, too: give "
                f"the {self.optimizer_name} its own parameters"
            )

    @property
    def skipped(self) -> SkippedUpdates:
        return self.optimizer.skipped

    def groups(self) -> Sequence[Mapping[str, Any]]:
        return self.optimizer.param_groups

    def before_forward(self) -> None:
        self.optimizer.outside.clear_applied()
        super().before_forward()

    def before_backward(self, *, is_replay: bool) -> None:
        super().before_backward(is_replay=is_replay)
        self.optimizer.begin_backward(self)
        self._deferred.clear()

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.is_replay and not bucket.is_mean:
            return  # Zeros of a rank that has run out of inputs: other ranks' gradients have not been added to them.
        if self._functional is not None and self._functional.adopts:
            self._functional.adopt(bucket.parameters)
            self.optimizer.stepper.refresh()
        share = self._shares.of(bucket, self.optimizer.stepper.layout)
        if self.is_deferred:
            await self._deferred.take(bucket, share, self._finds_unused)
        else:
            await self._interleave(bucket, share)
        self.lifecycle.gradients.note_reduced(bucket.parameters, own=share.owned)

    async def _interleave(self, bucket: Bucket, share: Share) -> None:
        parameters, gradients = share.parameters, share.gradients(bucket)
        if self._finds_unused is not False:
            used = await used_on_any_rank(bucket, parameters, self._finds_unused)
            self.lifecycle.gradients.note_unused(compress(parameters, map(operator.not_, used)))
            parameters, gradients = list(compress(parameters, used)), list(compress(gradients, used))
        if not self.lifecycle.leaves_update:
            self._apply(parameters, gradients)

    def _apply(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        veto = self.lifecycle.veto
        if not veto.stops:
            with veto.passed_to(self.stepped):
                self.optimizer.stepper.step(parameters, gradients)
        self.lifecycle.gradients.note_applied(parameters)

    def _updates(self, parameter: Tensor) -> bool:
        return (self._only is None or id(parameter) in self._only) and self.optimizer.stepper.covers(parameter)

    def after_backward(self, *, failed: bool) -> str | None:
        if failed:
            return self._note_failure()
        outcome = Phase.STEPPED if self.lifecycle.is_replay else self.lifecycle.outcome
        if self.is_automatic and not self.lifecycle.is_replay:
            self._check_left_out()
        if outcome is Phase.STEPPED and not self.is_deferred and not self.lifecycle.veto.stops:
            self._end_step()
        self.note_released()
        self.lifecycle.on_reduced(outcome)
        if outcome is Phase.STEPPED:
            mark_stepped(self.optimizer.optimizer)
        self.refuse_use_elsewhere()
        return None

    def _check_left_out(self) -> None:
        """Raises: TrainingLoopError: a parameter has a gradient but came in no bucket, such as one added since."""
        left = [] if self._only is not None else self.optimizer.registered_updates.outside_of_models()
        if left:
            self.lifecycle.on_failure()
            raise TrainingLoopError(
                f"{len(left)} parameters of the {self.optimizer_name} have gradients but are in no bucket of the "
                "model, so backward never updates them; give OverlappedOptimizer(optimizer) to Step and call its step()"
            )

    def _end_step(self) -> None:
        """All updates of the backward have been made, and no ``step()`` follows."""
        try:
            self.optimizer.end_step(self)
        except BaseException:
            self.lifecycle.on_failure()
            raise

    def _note_failure(self) -> str | None:
        is_in_backward = self.lifecycle.phase is Phase.BACKWARD
        updated = len(self.lifecycle.gradients.applied) if is_in_backward and not self.is_deferred else 0
        self.lifecycle.on_failure()
        if not updated:
            return None
        return (
            f"{updated} parameters had been updated by then, and on other ranks perhaps more or fewer: load a "
            "checkpoint before going on, or use Step(optimizer, deferred=True), which updates all or none"
        )

    def __repr__(self) -> str:
        parts = [self.optimizer_name, "deferred" if self.is_deferred else "interleaved"]
        if self._only is not None:
            parts.append(f"{len(self._only)} parameters")
        if self.clipping is not None:
            parts.append(f"clip_grad_norm={self.clipping.max_norm}")
        if self.releases_gradients:
            parts.append("release_gradients=True")
        return f"Step({', '.join(parts)})"


def _by_id(params: object) -> dict[int, Tensor]:
    """Raises: ConfigurationError: ``params`` are not parameters."""
    if (given := as_list(params)) is None or not all(isinstance(one, Tensor) for one in given):
        raise ConfigurationError(f"params is an iterable of parameters, or None for all, got {told(params)}")
    return {id(parameter): parameter for parameter in given}
