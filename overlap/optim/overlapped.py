"""The optimizer that a training loop holds when its update is made in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import refuse_capture
from overlap._torch.optimizer import (
    mark_stepped,
    run_post_hooks,
    run_pre_hooks,
    unwrapped,
)
from overlap.errors import ConfigurationError
from overlap.hooks.transforms.clip import in_model_order
from overlap.join import Join, Joinable, JoinHook
from overlap.join.joinable import refuse_before_model
from overlap.optim.applied import PassGradients
from overlap.optim.declared import check_nothing_before
from overlap.optim.grad_scaler import LossScale
from overlap.optim.lifecycle import refusals_told
from overlap.optim.phases import Event, Phase
from overlap.optim.proxy import OptimizerProxy
from overlap.optim.registered_updates import Registered, RegisteredUpdate, RegisteredUpdates
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.step_guard import guards_lifted
from overlap.optim.subset import SubsetStepper, check_optimizer, grads_replaced, step_whole
from overlap.optim.veto import Veto

__all__ = ["OverlappedOptimizer"]


class OverlappedOptimizer(OptimizerProxy, Joinable):
    """Wraps an optimizer whose update a :class:`Step` stage makes during backward.

    It shares ``param_groups``, ``state`` and ``defaults`` with the wrapped optimizer, so LR schedulers can be given
    either; ``state_dict`` and ``load_state_dict`` are the wrapped one's, unchanged, so checkpoints of either load into
    the other. :meth:`step` makes sure that every parameter with a gradient has been updated once: what the stage has
    updated in backward is left alone, the rest is updated now. Other attributes are the wrapped optimizer's.

    Step hooks (of either object) get the wrapped optimizer, and run once per :meth:`step`. With interleaved updates
    that is after the parameters have changed, so pre-hooks are refused there. ``GradScaler`` works with a deferred
    stage. A copy, by ``copy.deepcopy`` or ``pickle``, is registered with no model.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps without a closure; of Accelerate's and Lightning's wrappers
            the optimizer inside is taken.

    Raises:
        ConfigurationError: ``optimizer`` is something else, or is overlapped already.
        UnsupportedError: it needs a closure or sparse gradients.

    >>> optim = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-3))
    >>> chain(AllReduce(), Step(optim)).register(ddp)
    <chain(AllReduce(), Step(AdamW, interleaved)) registered>
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optim, step_size=1)
    >>> for x, y in loader:
    ...     loss_fn(ddp(x), y).backward()  # updates
    ...     optim.step()  # all is updated
    ...     scheduler.step()
    >>> len(optim.state_dict()["state"])
    4
    """

    def __init__(self, optimizer: Optimizer) -> None:
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, OverlappedOptimizer):
            raise ConfigurationError("this optimizer is an OverlappedOptimizer already; use it as it is")
        self.optimizer = check_optimizer(optimizer)
        Joinable.__init__(self)
        self.registered_updates = RegisteredUpdates(self.optimizer)
        """The stages that update with this optimizer."""
        self._stepper = SubsetStepper(self.optimizer)
        self.outside = PassGradients(owns=lambda parameter: True)
        """Gradients that :meth:`step` has applied of parameters which are in no registered model."""
        self.skipped = SkippedUpdates()
        """Where the loop says that a backward is not this optimizer's."""

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Update every parameter that has a gradient and was not updated in backward.

        Args:
            closure: evaluates the model and runs backward, as for any optimizer; its result is returned.
            **arguments: of the wrapped optimizer's ``step``, where the update is left to this call.

        Raises:
            TrainingLoopError: a gradient has not been reduced (no stage was ever registered with this optimizer, the
                backward ran under ``no_sync``, or did not reach every parameter), or was changed after an interleaved
                update had applied it (clipping, ``GradScaler``); or the last backward raised.
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture("OverlappedOptimizer.step()", "call it outside of the capture")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_before_model(self, lambda: any(update.lifecycle.is_joining() for update in self.registered_updates))
        Join.notify_join_context(self)
        with self._refusals_told():
            self._finish_step(arguments)
        return loss

    def _refusals_told(self) -> AbstractContextManager[None]:
        return refusals_told([update.lifecycle for update in self.registered_updates])

    def _finish_step(self, arguments: dict[str, Any]) -> None:
        loss_scale = LossScale.given_to(self)
        pending = self.registered_updates.pending(loss_scale, self.outside)
        self.registered_updates.check_call(arguments)
        veto = Veto.of_any(update.lifecycle.veto for update in self.registered_updates)
        is_made = not veto.stops
        try:
            if is_made:
                # A scaler's verdict is of the same gradients.
                with nullcontext() if loss_scale.is_used else veto.passed_to(self.optimizer):
                    self._update(pending, loss_scale, arguments)
        except BaseException:
            for update in self.registered_updates:
                update.lifecycle.on_update_failure()
            raise
        mark_stepped(self.optimizer)
        for update in self.registered_updates:
            update.lifecycle.on_step(pending)
        if is_made:
            self._note_outside(pending)

    def _note_outside(self, updated: list[Tensor]) -> None:
        """Note which of ``updated`` are in no registered model; the next forward of a model clears their gradients."""
        models = [update.lifecycle.names for update in self.registered_updates]
        if models and all(models):
            self.outside.note_applied(p for p in updated if not any(p in of_model for of_model in models))
            self.outside.note_left()

    def skip_update(self) -> AbstractContextManager[None]:
        """``with optimizer.skip_update():`` for backwards of a loss that is not this optimizer's.

        A backward that begins inside leaves averaged gradients and makes no update, whatever the form:
        :meth:`zero_grad` then discards it, another backward adds to it, :meth:`step` applies it, as with plain DDP.
        For example, for a generator's loss, which goes through the discriminator::

            with optimizer_d.skip_update():
                criterion(discriminator(generator(noise)), real).backward()
            optimizer_g.step()
            optimizer_d.zero_grad()

        Blocks may be nested, and end on an exception. Enter it on every rank alike. What matters is whether a backward
        begins inside of the block. Without a registered stage it has no effect.
        """
        return self.skipped.skipping()

    def _update(self, pending: list[Tensor], loss_scale: LossScale, arguments: dict[str, Any]) -> None:
        phases = {update.lifecycle.phase for update in self.registered_updates}
        if Phase.APPLIED in phases:
            self._finish(pending)
            return
        if not pending and phases == {Phase.STEPPED}:
            return
        # One for all: updates of one optimizer are made in one way.
        clipping = next((update.clipping for update in self.registered_updates), None)
        if clipping is None and loss_scale.is_supported_by(self.optimizer):
            with loss_scale.passed_to(self.optimizer):
                self._step(pending, arguments)
            return
        if loss_scale.skips_step(self.optimizer):
            return
        ordered = in_model_order(pending, *(update.lifecycle.names for update in self.registered_updates))
        gradients = [parameter.grad for parameter in ordered if parameter.grad is not None]
        with torch.no_grad():
            loss_scale.unscale_(gradients)
            if clipping is not None:
                clipping.clip_(gradients)
        with Veto(loss_scale.verdict_for(self.optimizer)).passed_to(self.optimizer):
            self._step(pending, arguments)

    def _step(self, pending: list[Tensor], arguments: dict[str, Any]) -> None:
        """One whole step, which any optimizer can do; what has been applied is hidden from it."""
        kept = set(map(id, pending))
        hidden = [p for group in self.param_groups for p in group["params"] if p.grad is not None and id(p) not in kept]
        with grads_replaced(hidden, [None] * len(hidden)):
            step_whole(self.optimizer, **arguments)

    @torch.no_grad()
    def _finish(self, pending: list[Tensor]) -> None:
        """Update what backward has left, such as parameters that are not in the model, and end the step."""
        if pending:
            self._stepper.refresh()
            self._stepper.step(pending, [parameter.grad for parameter in pending])  # type: ignore[misc]
        self.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; between backward and :meth:`step` it discards the backward.

        A registered chain clears what it has applied by itself, so a loop need not call this.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        with self._refusals_told():
            for update in self.registered_updates:
                update.lifecycle.check(Event.ZERO_GRAD)
            for update in self.registered_updates:
                update.lifecycle.on_zero_grad(set_to_none=set_to_none)
        self.outside.forget()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the wrapped optimizer's.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        for update in self.registered_updates:
            update.lifecycle.check(Event.LOAD)
        for update in self.registered_updates:
            update.lifecycle.on_load()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; parameters of the model are updated in backward from the next one on."""
        super().add_param_group(param_group)
        self._stepper.refresh()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Nothing to do besides DDP's own hook: a rank that has joined makes the update in the replayed backward."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        device: torch.device = next(p.device for group in self.param_groups for p in group["params"])
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The model's process group, once a stage is registered; the default one before."""
        groups = [update.context.group for update in self.registered_updates if update.context is not None]
        return groups[0] if groups else dist.group.WORLD  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "was_registered": self.registered_updates.phase is Registered.BEFORE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"])  # type: ignore[misc]
        if state.get("was_registered", False):
            self.registered_updates.phase = Registered.BEFORE

    def __repr__(self) -> str:
        return f"OverlappedOptimizer({self.optimizer!r})"

    # What a Step stage uses.

    def begin_backward(self, update: RegisteredUpdate) -> None:
        """A backward of the model of ``update`` begins; that of another model may be part of the same step."""
        if not update.is_deferred:
            check_nothing_before(self.optimizer)
        phases = {other.lifecycle.phase for other in self.registered_updates if other is not update}
        if phases & {Phase.BACKWARD, Phase.APPLIED}:
            self._stepper.refresh()
        else:
            self._stepper.begin()

    @property
    def stepper(self) -> SubsetStepper:
        """Steps parts of the parameters."""
        return self._stepper

    def end_step(self, update: RegisteredUpdate | None = None) -> None:
        """End a step whose updates were made in backward, by ``update`` in its own: write back what parts have left in
        groups, unless backward of another model is under way, and run the step hooks, of which pre-hooks only watch."""
        others = (other.lifecycle.phase for other in self.registered_updates if other is not update)
        if Phase.BACKWARD not in others:
            self._stepper.finish()
        with guards_lifted(self.optimizer):
            run_pre_hooks(self.optimizer)
            run_post_hooks(self.optimizer)
