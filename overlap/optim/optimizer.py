"""The optimizers that a training loop holds when stages update with them.

[Note: the loop's step]

:meth:`LoopOptimizer.step` makes the updates that stages have left, and ends those that they made in backward. ZeRO
without a stage is the same step, of gradients that the loop has averaged.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from overlap._checks import refuse_capture
from overlap._torch.optimizer import mark_stepped, patch_step, step_hooks, unwrapped
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.states import uncopied, warn_of_memory
from overlap.join.context import refuse_before_model
from overlap.optim.declared import check_nothing_before
from overlap.optim.lifecycle import SCALED_IN_BACKWARD, SCALED_UNDER_JOIN, Event, Phase, report_refusals
from overlap.optim.stepper import FoundInf, StepGuard, SubsetStepper, check_optimizer, grads_replaced, step_whole
from overlap.optim.update import Update, UpdatedOptimizer, check_unscaled

_lifecycle_of = operator.attrgetter("lifecycle")
_phase_of = operator.attrgetter("phase")
_verdict_of = operator.attrgetter("verdict")


def warn_of_stages(updates: Sequence[Update[Any]]) -> None:
    """Warn, once, where only the state of an optimizer is saved or loaded, and stages beside it remember something."""

    def has_memory() -> bool:
        found = [update.lifecycle.context for update in updates]
        models = [context.ddp() for context in found if context is not None and context.ddp is not None]
        registrations = [registration_of(ddp) for ddp in models if ddp is not None]
        with uncopied():
            return any(one is not None and one.stage.state_dict() for one in registrations)

    warn_of_memory(has_memory, "the memory of the registered stages", stacklevel=4)


def evaluated(closure: Callable[[], Any]) -> Any:
    """The result of the closure of a ``step()``, whose caller may be under ``no_grad``."""
    with torch.enable_grad():
        return closure()


class LoopOptimizer(UpdatedOptimizer, Joinable):
    """Base of :class:`OverlappedOptimizer` and :class:`ZeroRedundancyOptimizer`. See [Note: the loop's step]."""

    # GradScaler then leaves gradients as they are, always calls step(), and sets found_inf and grad_scale here.
    _step_supports_amp_scaling = True

    updates: list[Update[Any]]
    """The registered stages that update with this optimizer, each for a model of its own."""

    @abstractmethod
    def _check_call(self, arguments: Mapping[str, Any]) -> None:
        """Called first by ``step(**arguments)``; may refuse it."""

    @abstractmethod
    def _update(self, pending: list[Tensor], scaler: FoundInf, verdict: FoundInf, arguments: dict[str, Any]) -> None:
        """Make one whole step of the parameters whose gradients are ``pending``, if there is one to make, unless the
        ``scaler`` has found one that is not finite; ``verdict`` is the stages'."""

    @abstractmethod
    def _finish_backward(self, pending: list[Tensor]) -> None:
        """End a step that was made in backward, but for ``pending`` parameters."""

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
        loss = None if closure is None else evaluated(closure)
        updates, scaler = self.updates, FoundInf.given_to(self)
        refuse_before_model(self, lambda: any(update.lifecycle.is_joining() for update in updates))
        Join.notify_join_context(self)
        lifecycles = list(map(_lifecycle_of, updates))
        with report_refusals(lifecycles):
            self._check_call(arguments)
            for update in updates if scaler.found_inf is not None else ():
                if update.lifecycle.outcome is not Phase.REDUCED:
                    raise TrainingLoopError(SCALED_IN_BACKWARD.format(deferred=update.form.deferred_code))
                if update.lifecycle.is_joining():
                    raise TrainingLoopError(SCALED_UNDER_JOIN)
                check_unscaled(update.before)
            for lifecycle in lifecycles:
                lifecycle.check_step()
            pending = self._pending()
            for update in updates if pending else ():
                update.lifecycle.check_reduced(pending, allows_zeros=not update.is_sharded)
            phases = list(map(_phase_of, lifecycles))
            is_over = phases.count(Phase.STEPPED) == len(phases)
            for update in updates:
                update.lifecycle.check_once(is_all=is_over and (update.is_sharded or not pending))
            verdicts = list(map(_verdict_of, lifecycles))
            verdict = verdicts[0] if len(verdicts) == 1 else FoundInf.of_any(verdicts)
            is_made = verdict.found_inf is None or not verdict.skips(self.stepped)
            try:
                if is_made and Phase.APPLIED in phases:
                    self._finish_backward(pending)
                elif is_made:
                    self._update(pending, scaler, verdict, arguments)
            except BaseException:
                for lifecycle in lifecycles:
                    lifecycle.on_update_failure()
                raise
            mark_stepped(self)
            if scaler.found_inf is not None:
                verdict = FoundInf.of_any([verdict, scaler])
            for lifecycle in lifecycles:
                lifecycle.on_step(pending, verdict=verdict)
            if pending and is_made and updates and not updates[0].is_sharded:
                known = {id(parameter) for lifecycle in lifecycles for parameter in lifecycle.names}
                for parameter in pending if all(lifecycle.names for lifecycle in lifecycles) else ():
                    if id(parameter) not in known:
                        parameter.grad = None  # No forward of a model clears it.
        return loss

    def _pending(self) -> list[Tensor]:
        """The parameters with a gradient that was not applied yet, in the groups' order."""
        ids: set[int] = set()
        for update in self.updates:
            ids.update(update.lifecycle.gradients.applied)
        return [p for group in self.param_groups for p in group["params"] if id(p) not in ids and p.grad is not None]

    # The rest of an optimizer.

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

        A registered chain clears gradients that it has applied by itself, so a loop need not call this.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        with report_refusals(update.lifecycle for update in self.updates):
            for update in self.updates:
                update.lifecycle.check(Event.ZERO_GRAD)
            for update in self.updates:
                update.lifecycle.on_zero_grad(set_to_none=set_to_none)
        super().zero_grad(set_to_none)


class OptimizerProxy(Optimizer):
    """Shares everything with the optimizer that it wraps: groups, state, defaults and step hooks, at all times.

    A subclass has a ``step`` of its own; its step hooks, which are the wrapped optimizer's, run around that.
    """

    # GradScaler then leaves gradients as they are, always calls step, and says there whether they are finite.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        """The wrapped optimizer."""
        patch_step(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # Not set yet: a copy or an unpickled object in the making.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state_dict))


class OverlappedOptimizer(LoopOptimizer, OptimizerProxy):
    """Wraps an optimizer whose update a :class:`Step` stage makes during backward.

    It shares groups, state and all other attributes with the wrapped optimizer, so LR schedulers can be given either,
    and checkpoints of either load into the other. :meth:`step` updates every parameter with a gradient that the stage
    has not updated in backward.

    Step hooks (of either object) get the wrapped optimizer, and run once per :meth:`step`. With interleaved updates
    that is after the parameters have changed, so pre-hooks are refused there. ``GradScaler`` works with a deferred
    stage. A copy, by ``copy.deepcopy`` or ``pickle``, is registered with no model.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps without a closure; of Accelerate's and Lightning's wrappers
            the optimizer inside is taken.

    Raises:
        ConfigurationError: ``optimizer`` is something else, or is overlapped already.
        UnsupportedError: it needs a closure.

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
        self.optimizer = check_optimizer(optimizer)  # The wrapped one runs the step hooks: step() is not patched.
        Joinable.__init__(self)
        self.updates, self.blocks = [], []
        self.was_registered = False
        """Whether a stage has ever updated with this optimizer; if none has, nothing averages its gradients."""
        self.stepper = SubsetStepper(self.optimizer)
        """Steps parts of the parameters."""

    def state_dict(self) -> dict[str, Any]:
        warn_of_stages(self.updates)
        return super().state_dict()

    def _check_call(self, arguments: Mapping[str, Any]) -> None:
        for update in self.updates:
            if update.lifecycle.phase is Phase.APPLIED:
                check_nothing_before(self.optimizer)
                if arguments:
                    raise TrainingLoopError(
                        f"step() was given {', '.join(arguments)}, but the update was made in backward; use "
                        "Step(optimizer, deferred=True)"
                    )
        if self.was_registered:
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(bool(gradient.any()) for gradient in gradients):
            raise TrainingLoopError(
                f"no stage updates with this {type(self.optimizer).__name__}'s OverlappedOptimizer, so nothing has "
                "averaged its gradients over ranks: first call chain(AllReduce(), Step(optimizer)).register(ddp)"
            )

    def _update(self, pending: list[Tensor], scaler: FoundInf, verdict: FoundInf, arguments: dict[str, Any]) -> None:
        if self.updates and not pending and all(one.lifecycle.phase is Phase.STEPPED for one in self.updates):
            return
        gradients = [parameter.grad for parameter in pending if parameter.grad is not None]
        if scaler.is_supported_by(self.optimizer):
            verdict = scaler  # It is of the same gradients.
        elif scaler.skips(self.optimizer):
            return
        else:
            with torch.no_grad():
                scaler.unscale_(gradients)
            verdict = FoundInf.of_any([verdict, scaler])
        self._apply(pending, gradients, verdict, arguments)

    def _apply(
        self, parameters: Sequence[Tensor], gradients: list[Tensor], verdict: FoundInf, arguments: dict[str, Any]
    ) -> None:
        """Make one whole step, which any optimizer can do; gradients that have been applied are hidden from it."""
        with verdict.passed_to(self.optimizer):
            if not arguments and self.stepper.step_by_kernels(parameters, gradients):
                return
        wanted = dict(zip(map(id, parameters), gradients, strict=True))
        others = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not wanted.get(id(parameter))
        ]
        with verdict.passed_to(self.optimizer), grads_replaced(others, [wanted.get(id(one)) for one in others]):
            step_whole(self.optimizer, **arguments)

    @torch.no_grad()
    def _finish_backward(self, pending: list[Tensor]) -> None:
        if pending:  # Parameters that backward has left, such as those that are not in the model.
            self.stepper.refresh()
            self.stepper.step(pending, [parameter.grad for parameter in pending])  # type: ignore[misc]
        self.end_step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the wrapped optimizer's. Raises: TrainingLoopError: the update was made in backward, and :meth:`step` is
        due."""
        warn_of_stages(self.updates)
        for update in self.updates:
            update.lifecycle.check(Event.LOAD)
        self.stepper.forget_state()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; parameters of the model are updated in backward from the next one on."""
        super().add_param_group(param_group)
        self.stepper.refresh()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Empty: a rank that has joined makes the update in the replayed backward."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        device: torch.device = next(p.device for group in self.param_groups for p in group["params"])
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The model's process group, once a stage is registered; the default one before."""
        groups = [update.context.group for update in self.updates if update.context is not None]
        return groups[0] if groups else dist.group.WORLD  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "was_registered": self.was_registered and not self.updates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"])  # type: ignore[misc]
        self.was_registered = state.get("was_registered", False)

    def __repr__(self) -> str:
        return f"OverlappedOptimizer({self.optimizer!r})"

    # For a Step stage.

    @property
    def stepped(self) -> Optimizer:
        return self.optimizer

    @property
    def version(self) -> object:
        return self.stepper.layout

    def end_step(self, update: Update[Any] | None = None) -> None:
        """End a step that was made in backward, by ``update`` in its own: write back the values that parts have left,
        unless backward of another model is under way, and run the step hooks, of which pre-hooks only watch."""
        for other in self.updates:
            if other is not update and other.lifecycle.phase is Phase.BACKWARD:
                break
        else:
            self.stepper.finish()
        before, after = step_hooks(self.optimizer)
        for hook in before + after:
            if not isinstance(hook, StepGuard):
                hook(self.optimizer, (self.optimizer,), {})
