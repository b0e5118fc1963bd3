"""The optimizer that a training loop holds when its update is made in backward, which wraps the loop's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import told
from overlap._torch.optimizer import patch_step, run_step_hooks, unwrapped
from overlap.errors import ArgumentTypeError, ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks.transforms.clip import Clipping, in_model_order
from overlap.join import Joinable, JoinHook
from overlap.optim.applied import PassGradients
from overlap.optim.declared import check_nothing_before
from overlap.optim.phases import Event, Phase
from overlap.optim.scaler import LossScale, Veto
from overlap.optim.subset import StepGuard, SubsetStepper, check_optimizer, grads_replaced, step_whole
from overlap.optim.update import LoopOptimizer, Update

__all__ = ["OptimizerProxy", "OverlappedOptimizer"]


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

    def __init__(self, optimizer: Optimizer, *others: Never, **options: Never) -> None:
        if others or options:
            raise ArgumentTypeError(_of_an_optimizer(optimizer, others, options))
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
        self.outside = PassGradients(owns=lambda parameter: True)
        """Gradients that :meth:`step` has applied of parameters which are in no registered model."""

    def _check_call(self, loss_scale: LossScale, arguments: Mapping[str, Any]) -> None:
        if self.was_registered:
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(bool(gradient.any()) for gradient in gradients):
            raise TrainingLoopError(
                f"no stage updates with this {type(self.optimizer).__name__}'s OverlappedOptimizer, so nothing has "
                "averaged its gradients over ranks: first call chain(AllReduce(), Step(optimizer)).register(ddp)"
            )

    def _pending(self) -> list[Tensor]:
        pending = super()._pending()
        if pending and (as_left := set(map(id, self.outside.as_left()))):
            pending = [parameter for parameter in pending if id(parameter) not in as_left]
        return pending

    def _check_applied(self, arguments: Mapping[str, Any]) -> None:
        check_nothing_before(self.optimizer)
        if arguments:
            raise TrainingLoopError(
                f"step() was given {', '.join(arguments)}, but the update was made in backward; use "
                "Step(optimizer, deferred=True)"
            )

    def _update(self, pending: list[Tensor], loss_scale: LossScale, veto: Veto, arguments: dict[str, Any]) -> None:
        if loss_scale.is_supported_by(self.optimizer) and not any(update.clipping for update in self.updates):
            with loss_scale.passed_to(self.optimizer):  # A scaler's verdict is of the same gradients as a stage's.
                self._apply(pending, [], Veto(), arguments)
        else:
            super()._update(pending, loss_scale, veto, arguments)

    def _gradients(self, pending: list[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        return pending, [parameter.grad for parameter in pending if parameter.grad is not None]

    def _clip_(self, clipping: Clipping, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Tensor:
        ordered = in_model_order(parameters, *(update.lifecycle.names for update in self.updates))
        return clipping.clip_([parameter.grad for parameter in ordered if parameter.grad is not None])

    def _apply(
        self, parameters: Sequence[Tensor], gradients: list[Tensor], veto: Veto, arguments: dict[str, Any]
    ) -> None:
        # One whole step, which any optimizer can do; what has been applied is hidden from it.
        kept = set(map(id, parameters))
        hidden = [p for group in self.param_groups for p in group["params"] if p.grad is not None and id(p) not in kept]
        with veto.passed_to(self.optimizer), grads_replaced(hidden, [None] * len(hidden)):
            step_whole(self.optimizer, **arguments)

    @torch.no_grad()
    def _finish_backward(self, pending: list[Tensor]) -> None:
        if pending:  # What backward has left, such as parameters that are not in the model.
            self.stepper.refresh()
            self.stepper.step(pending, [parameter.grad for parameter in pending])  # type: ignore[misc]
        self.end_step()

    def _note_stepped(self, pending: list[Tensor]) -> None:
        models = [update.lifecycle.names for update in self.updates]
        if models and all(models):
            # The next forward of a model clears the gradients of parameters that are in no registered one, too.
            self.outside.note_applied([p for p in pending if not any(p in of_model for of_model in models)])
            self.outside.note_left()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See :meth:`LoopOptimizer.zero_grad`."""
        super().zero_grad(set_to_none)
        self.outside.forget()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the wrapped optimizer's. Raises: TrainingLoopError: the update was made in backward, and :meth:`step` is
        due."""
        for update in self.updates:
            update.lifecycle.check(Event.LOAD)
        for update in self.updates:
            update.lifecycle.on_load()
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

    # What a Step stage uses.

    @property
    def stepped(self) -> Optimizer:
        return self.optimizer

    @property
    def scheduled(self) -> Optimizer:
        return self.optimizer

    @property
    def version(self) -> object:
        return self.stepper.layout

    def check_same_way(self, update: Update[Any]) -> None:
        """Raises: ConfigurationError: another stage updates with this optimizer in another way."""
        for other in self.updates:
            if (other.is_deferred, other.clipping) != (update.is_deferred, update.clipping):
                raise ConfigurationError(f"one optimizer is updated in one way, but has {other!r} and {update!r}")
            if (other.may_skip or update.may_skip) and not update.updates_in_step:
                raise UnsupportedError(
                    f"one optimizer serves two models, and where gradients of one are not finite {update!r} may have "
                    "updated the other already: use Step(optimizer, deferred=True) for both"
                )

    def outside_of_models(self) -> list[Tensor]:
        """Parameters that have a gradient, and that no registered model has."""
        lifecycles = [update.lifecycle for update in self.updates]
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            and not any(parameter in one.names or id(parameter) in one.gradients.reduced for one in lifecycles)
        ]

    def begin_backward(self, update: Update[Any]) -> None:
        """A backward of the model of ``update`` begins; that of another model may be part of the same step."""
        if not update.is_deferred:
            check_nothing_before(self.optimizer)
        for other in self.updates:
            if other is not update and other.lifecycle.phase in (Phase.BACKWARD, Phase.APPLIED):
                self.stepper.refresh()
                return
        self.stepper.begin()

    def end_step(self, update: Update[Any] | None = None) -> None:
        """End a step that was made in backward, by ``update`` in its own: write back the values that parts have left,
        unless backward of another model is under way, and run the step hooks, of which pre-hooks only watch."""
        for other in self.updates:
            if other is not update and other.lifecycle.phase is Phase.BACKWARD:
                break
        else:
            self.stepper.finish()
        run_step_hooks(self.optimizer, leaving_out=StepGuard)


def _of_an_optimizer(given: object, others: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The message where :class:`OverlappedOptimizer` was given the arguments of an optimizer's class."""
    cls = next((one for one in (given, *others) if isinstance(one, type)), torch.optim.AdamW)
    written = ", ".join(f"{key}={told(value)}" for key, value in options.items())
    name = f"torch.optim.{cls.__name__}" if cls.__module__.startswith("torch.optim.") else cls.__name__
    return (
        "OverlappedOptimizer wraps one optimizer, which has its options already: write "
        f"OverlappedOptimizer({name}(ddp.parameters(){', ' if written else ''}{written}))"
    )
