"""The update of replicated parameters, in backward or after it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.device import has_streams
from overlap._torch.optimizer import mark_stepped, unwrapped
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext, whole_pass
from overlap.join.active import active_join
from overlap.optim.clipping import GradientNorms
from overlap.optim.functional import FunctionalOptimizer
from overlap.optim.in_backward import check_draws, check_in_turn
from overlap.optim.overlapped import OverlappedOptimizer
from overlap.optim.phases import Phase
from overlap.optim.probe import probe
from overlap.optim.share import LateUpdate, Share, Shares
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.step_guard import StepGuard, check_one_model, guarded_by
from overlap.optim.subset import grads_replaced, raise_versions, step_whole
from overlap.optim.unused import tell_used, used_on_any_rank
from overlap.optim.update_marks import UpdateMarks
from overlap.optim.update_stage import UpdateStage

__all__ = ["Step"]


class Step(UpdateStage):
    """Updates parameters with the averaged gradients of their bucket, on every rank alike.

    *Interleaved* (default): each bucket's parameters are updated as soon as it is reduced, while backward still
    computes the next ones. *Deferred* (``deferred=True``, or ``clip_grad_norm``): all are updated at once, when all
    gradients are there. Clipping by the global norm and ``GradScaler`` need that, and so do optimizers whose step
    couples parameters, that draw random numbers, or that have a step pre-hook.

    Given an :class:`OverlappedOptimizer`, the loop calls its ``step()``: after each backward where updates are
    interleaved, after one or more where they are deferred. A deferred update is made there. Given a plain or a
    functional optimizer, the stage does everything in backward (the deferred update with the last bucket), and the loop
    calls no ``step()``.

    After backward ``.grad`` holds the averaged gradient; it is cleared before the model's next forward.

    Args:
        optimizer: what updates; it may have parameters that the model has not. Of Accelerate's and Lightning's
            wrappers the optimizer inside is taken.
        params: update these alone in backward; the others keep their averaged ``.grad`` (an ``OverlappedOptimizer``
            updates its own among them in ``step()``).
        deferred: update all parameters at once; by default only where clipping needs it.
        clip_grad_norm: scale the averaged gradients to at most this global norm first, as
            ``torch.nn.utils.clip_grad_norm_`` does; implies ``deferred``.
        norm_type: which norm.
        release_gradients: give a bucket's memory back as soon as it is updated, and take it again when its next
            gradient comes, so that gradients hardly add to the peak. ``.grad`` is ``None`` after backward. Needs
            ``DistributedDataParallel(..., gradient_as_bucket_view=True)``; see ``docs/memory.md``.

    Issues: nothing; where DDP looks for unused parameters and the update is interleaved, one all-reduce of a byte a
    parameter, because a parameter that no rank used must not be updated (weight decay and momentum would move it).

    Raises:
        ConfigurationError: an argument is out of range, or (at registration) optimizer and model do not fit.
        UnsupportedError: at registration, if updating bucket by bucket would not equal one step of this optimizer.
        RegistrationError: another model has a stage that updates the same parameters with this optimizer.
        TrainingLoopError: in ``backward``, when an interleaved update has not been followed by ``step()``, or when
            something else refers to a gradient that is to be released; and as ``docs/lifecycle.md`` has it.

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
        automatic = not isinstance(optimizer, OverlappedOptimizer)
        super().__init__(
            deferred=deferred,
            automatic=automatic,
            clip_grad_norm=clip_grad_norm,
            norm_type=norm_type,
            step="optimizer.step()",
            deferred_form=f"{'an OverlappedOptimizer and ' if automatic else ''}Step(optimizer, deferred=True)",
            skip="stage.skip_update()" if automatic else "optimizer.skip_update()",
            adds_up=True,
            release_gradients=release_gradients,
        )
        self.norms = None if self.clipping is None else GradientNorms(norm_type)
        self._functional = optimizer if isinstance(optimizer, FunctionalOptimizer) else None
        plain = optimizer.optimizer if isinstance(optimizer, FunctionalOptimizer) else optimizer
        self.optimizer = plain if isinstance(plain, OverlappedOptimizer) else OverlappedOptimizer(plain)
        self._only = None if params is None else {id(parameter): parameter for parameter in params}
        self._check_params()
        self._guard: torch.utils.hooks.RemovableHandle | None = None
        # As the update of the last pass had them.
        self._named: dict[Tensor, str] = {}
        self._shares = Shares(self._updates, self.owns_gradient_of)
        self._late = LateUpdate()
        self._ends_chain = False
        self._is_copied = False
        # Of a deferred update in backward, bucket by bucket.
        self._held: list[tuple[list[Tensor], list[Tensor]]] = []

    def _check_params(self) -> None:
        if self._only is None:
            return
        if not self._only:
            raise ConfigurationError("params is empty: nothing would be updated; leave it out to update all")
        if any(not self.optimizer.stepper.covers(parameter) for parameter in self._only.values()):
            raise ConfigurationError(f"params has parameters that the {self.optimizer_name} does not have")
        if self.is_deferred:
            raise ConfigurationError("params chooses what is updated in backward, but deferred updates come after it")

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
        self._check_coverage(context)
        self.optimizer.check_same_way(self)
        check_one_model(self.optimizer.optimizer, context)
        self._check_order()
        super().attach(context)
        if self._functional is not None and self._adopts_parameters and context.names is not None:
            # In the model's order, which is that of its state, and not as buckets bring them.
            self._functional.adopt(parameter for parameter in context.names if parameter.requires_grad)
            self.optimizer.stepper.refresh()
        self.optimizer.adopt(self)
        ddp = None if context.ddp is None else context.ddp()
        self._is_copied = ddp is not None and not ddp.gradient_as_bucket_view and not has_streams(context.device)
        if self._functional is None:
            through = None if self.is_automatic else self.optimizer
            self._guard = guarded_by(StepGuard(self, self._instead, through=through), self.optimizer.optimizer)

    @property
    def _instead(self) -> str:
        """How the optimizer is stepped, and what to call in place of its own ``step()``."""
        if not self.is_automatic:
            return (
                "by the OverlappedOptimizer that wraps it, and its own step() would apply the gradients again: call "
                "step() of the OverlappedOptimizer"
            )
        return (
            "inside backward, and step() would apply the gradients again: leave the call out, or give "
            "OverlappedOptimizer(optimizer) to Step and call that one's step() (with GradScaler, together with "
            "deferred=True)"
        )

    def _check_order(self) -> None:
        """Raises: UnsupportedError: an update in backward would not come in the order of one whole step."""
        if self.updates_in_step:
            return
        optimizer, instead = self.optimizer.optimizer, self.lifecycle.form.deferred
        found = probe(optimizer)
        check_draws(optimizer, found, instead=instead)
        if not self.is_deferred:
            check_in_turn(optimizer, found, instead=instead)

    def _check_coverage(self, context: StageContext) -> None:
        if context.names is None or self._adopts_parameters:
            return
        self.optimizer.stepper.refresh()
        of_model = set(map(id, context.names))
        of_optimizer = [p for group in self.optimizer.param_groups for p in group["params"]]
        outside = [p for p in of_optimizer if id(p) not in of_model and p.requires_grad]
        if of_model.isdisjoint(map(id, of_optimizer)):
            raise ConfigurationError(
                f"the {self.optimizer_name} has no parameter of this model; build it from ddp.parameters()"
            )
        if outside and self.is_automatic and self._only is None:
            raise ConfigurationError(
                f"{len(outside)} parameters of the {self.optimizer_name} are not in this model, so backward would "
                "never update them; give OverlappedOptimizer(optimizer) to Step and call its step()"
            )

    def placed(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        super().placed(before, after)
        self._ends_chain = not after

    def detach(self) -> None:
        super().detach()
        self._shares.forget()
        self._named = {}
        self.optimizer.release(self)
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

    def marks_of(self, updated: list[Tensor], samples: bool) -> UpdateMarks:
        optimizer, names = self.optimizer.optimizer, self.lifecycle.names
        if len(updated) != len(self._named) or not all(map(operator.is_, updated, self._named)):
            self._named = {parameter: names.get(parameter, "a parameter") for parameter in updated}

        def states() -> list[Mapping[Any, Any]]:
            state = optimizer.state
            return [state.get(parameter, {}) for parameter in updated] if state else [{}] * len(updated)

        return UpdateMarks(
            lambda: optimizer.param_groups, states, list(self._named.values()), self._named, samples=samples
        )

    def before_forward(self) -> None:
        self.optimizer.outside.on_forward()
        super().before_forward()

    def before_backward(self, *, is_replay: bool) -> None:
        super().before_backward(is_replay=is_replay)
        self.optimizer.begin_backward(self)
        self._held.clear()
        self._late.clear()
        if self.norms is not None:
            self.norms.clear()

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.is_replay and not bucket.is_mean:
            return  # Zeros of a rank that has run out of inputs: other ranks' gradients have not been added to them.
        if self._functional is not None and self._functional.adopts:
            self._functional.adopt(bucket.parameters)
            self.optimizer.stepper.refresh()
        share = self._shares.of(bucket, self.optimizer.stepper.layout)
        if self.is_deferred:
            await self._defer(bucket, share)
        else:
            await self._interleave(bucket, share)
        is_copied = self._is_copied and bucket.step > 0 and bucket.raw is not None and not bucket.is_replay
        self.lifecycle.gradients.note_reduced(bucket.parameters, own=share.owned, copied=bucket if is_copied else None)

    async def _interleave(self, bucket: Bucket, share: Share) -> None:
        parameters, gradients = share.parameters, share.gradients(bucket)
        if self._finds_unused is not False:
            used = await used_on_any_rank(bucket, parameters, self._finds_unused)
            self.lifecycle.gradients.note_unused(compress(parameters, map(operator.not_, used)))
            parameters, gradients = list(compress(parameters, used)), list(compress(gradients, used))
        if self.leaves_update:
            return
        if not (bucket.is_late and self._ends_chain):
            self._apply(parameters, gradients)
        elif (everything := self._late.with_all(bucket, parameters, gradients)) is not None:
            self._apply(*everything)

    @property
    def _finds_unused(self) -> bool | None:
        return None if self.context is None else self.context.finds_unused

    async def _defer(self, bucket: Bucket, share: Share) -> None:
        parameters = share.parameters
        if self.norms is not None:
            self.norms.take(parameters, share.gradients(bucket))
        # A rank that replays has no step() of its own to wait for, and learns here what the others' .grad tells them.
        is_told = self._finds_unused is not False and active_join(bucket.group) is not None
        if not (self.is_automatic or bucket.is_replay or is_told):
            return
        if bucket.is_replay and self._finds_unused and not (self.is_automatic or is_told):
            raise UnsupportedError(
                "PyTorch's Join with find_unused_parameters does not tell a rank without inputs which parameters the "
                "others used; use `with overlap.Join([ddp, optimizer])`, or the interleaved update"
            )
        if self.leaves_update and not bucket.is_replay and self._finds_unused:
            await tell_used(bucket, parameters)
            return
        used = await used_on_any_rank(bucket, parameters, self._finds_unused)
        if self.leaves_update and not bucket.is_replay:
            return
        self._held.append((list(compress(parameters, used)), list(compress(share.gradients(bucket), used))))
        await whole_pass()
        # The first to go on updates all: as soon as it is through, DDP may copy its gradients out of the bucket.
        if self._held:
            self._apply_all()

    @torch.no_grad()
    def _apply_all(self) -> None:
        pairs = {
            id(parameter): (parameter, gradient)
            for parameters, gradients in self._held
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }
        self._held.clear()
        if self.lifecycle.veto.stops:
            self.lifecycle.gradients.note_applied(parameter for parameter, _ in pairs.values())
            return
        groups = self.optimizer.param_groups
        # In the optimizer's order, in which clip_grad_norm_ adds norms up.
        ordered = [pairs[id(parameter)] for group in groups for parameter in group["params"] if id(parameter) in pairs]
        if self.clipping is not None and self.norms is not None and ordered:
            noted = self.norms.noted([parameter for parameter, _ in ordered])
            self.clipping.scale_([gradient for _, gradient in ordered], noted)
        parameters = [parameter for parameter, _ in ordered]
        optimizer = self.optimizer.optimizer
        every = [parameter for group in groups for parameter in group["params"]]
        gradients = [pairs[id(parameter)][1] if id(parameter) in pairs else None for parameter in every]
        with grads_replaced(every, gradients), self.lifecycle.veto.passed_to(optimizer):
            step_whole(optimizer)
        raise_versions(parameters, groups)
        self.lifecycle.gradients.note_applied(parameters)

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
        if self.norms is not None:
            self.norms.note_gradients(self.lifecycle.gradients.reduced)
        outcome = Phase.STEPPED if self.lifecycle.is_replay else self.lifecycle.outcome
        if self.is_automatic and not self.lifecycle.is_replay:
            self._check_left_out()
        if outcome is Phase.STEPPED and not self.is_deferred and not self.lifecycle.veto.stops:
            self._run_hooks()
        self.note_released()
        self.lifecycle.on_reduced(outcome)
        if outcome is Phase.STEPPED:
            mark_stepped(self.optimizer.optimizer)
        self.refuse_use_elsewhere()
        return None

    def _check_left_out(self) -> None:
        """Raises: TrainingLoopError: a parameter has a gradient but came in no bucket, such as one added since."""
        if self._only is not None:
            return
        left = self.optimizer.outside_of_models()
        if left:
            self.lifecycle.on_failure()
            raise TrainingLoopError(
                f"{len(left)} parameters of the {self.optimizer_name} have gradients but are in no bucket of the "
                "model, so backward never updates them; give OverlappedOptimizer(optimizer) to Step and call its step()"
            )

    def _run_hooks(self) -> None:
        """Step hooks, once, when all updates of the backward have been made."""
        try:
            self.optimizer.run_hooks()
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
