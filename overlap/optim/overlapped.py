"""The optimizer that a training loop holds when its update rides in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.foreach import scale_
from overlap._torch.optimizer import mark_stepped, patch_step, unhooked_step
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join import Join, Joinable, JoinHook
from overlap.optim.subset import SubsetStepper, check_optimizer

if TYPE_CHECKING:
    from overlap.optim.step import Step

__all__ = ["OverlappedOptimizer"]


class OverlappedOptimizer(Optimizer, Joinable):
    """Wraps an optimizer whose update a :class:`Step` stage makes during backward.

    It shares ``param_groups``, ``state`` and ``defaults`` with the wrapped optimizer, so LR schedulers can be given
    either; ``state_dict`` and ``load_state_dict`` are the wrapped one's, unchanged, so checkpoints go both ways.
    :meth:`step` makes sure that every parameter with a gradient has been updated once: what the stage has updated in
    backward is left alone, the rest is updated now. Other attributes are the wrapped optimizer's.

    Step hooks (of either object) run around :meth:`step`; with interleaved updates that is after the parameters have
    changed. ``GradScaler`` works with a deferred stage.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps without a closure.

    Raises:
        ConfigurationError: ``optimizer`` is none, or is overlapped already.
        UnsupportedError: it needs a closure or sparse gradients.
    """

    # GradScaler then leaves the gradients as they are, always calls step, and says here whether they are finite.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, OverlappedOptimizer):
            raise ConfigurationError("this optimizer is an OverlappedOptimizer already; use it as it is")
        self.optimizer = check_optimizer(optimizer)
        Joinable.__init__(self)
        self._stages: list[Step] = []
        self._stepper = SubsetStepper(self.optimizer)
        self._applied: set[int] = set()
        patch_step(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # Not set yet: a copy or an unpickled object in the making.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and was not updated in backward.

        Args:
            closure: evaluates the model and runs backward, as for any optimizer; its result is returned.

        Raises:
            TrainingLoopError: a gradient has not been reduced (the backward ran under ``no_sync``, or did not reach
                every parameter), or was changed after an interleaved update had applied it (clipping,
                ``GradScaler``).
        """
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for stage in self._stages:
            stage.check_complete()
            stage.check_unchanged()
        pending = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) not in self._applied
        ]
        for stage in self._stages:
            stage.check_reduced(pending)
        found_inf, scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")
        if found_inf is None:
            self._update(pending)
        else:
            self._update_scaled(pending, found_inf, scale)
        # Only the model's own: of other gradients nobody tells when they are new.
        self.note_applied([p for p in pending if any(stage.has_reduced(p) for stage in self._stages)])
        mark_stepped(self.optimizer)
        for stage in self._stages:
            stage.on_stepped()
        return loss

    @torch.no_grad()
    def _update(self, pending: list[Tensor]) -> None:
        if not pending:
            return
        clipping = next((stage.clipping for stage in self._stages if stage.clipping is not None), None)
        if clipping is not None:
            gradients = [parameter.grad for parameter in pending]
            clipping.scale_(gradients, self._norms(pending))  # type: ignore[arg-type]
        if self._applied:
            self._stepper.refresh()
            self._stepper.step(pending, [parameter.grad for parameter in pending])  # type: ignore[misc]
        else:
            # Nothing was updated in backward: one whole step, which any optimizer can do.
            unhooked_step(type(self.optimizer))(self.optimizer)

    def _norms(self, parameters: list[Tensor]) -> list[Tensor]:
        for stage in self._stages:
            if stage.norms is not None:
                return stage.norms.of(parameters)
        raise AssertionError("a stage that clips takes norms")

    @torch.no_grad()
    def _update_scaled(self, pending: list[Tensor], found_inf: Tensor, scale: Tensor | None) -> None:
        """A step for ``GradScaler``: skipped where a gradient is not finite, unscaled by ``1 / scale`` elsewhere."""
        if any(not stage.is_deferred for stage in self._stages):
            raise TrainingLoopError(
                "GradScaler decides after backward whether to step, but the parameters were updated in backward; "
                "use Step(optimizer, deferred=True) with it"
            )
        clips = any(stage.clipping is not None for stage in self._stages)
        if getattr(self.optimizer, "_step_supports_amp_scaling", False) and not clips:
            # The kernel itself unscales and skips, and the host does not wait for the verdict.
            self.optimizer.grad_scale, self.optimizer.found_inf = scale, found_inf  # type: ignore[attr-defined]
            try:
                self._update(pending)
            finally:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
            return
        if found_inf.item():
            return
        if scale is not None and pending:
            scale_([parameter.grad for parameter in pending], scale.double().reciprocal().float())  # type: ignore[misc]
        self._update(pending)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; not needed for what a registered chain updates."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optimizer.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The wrapped optimizer's; parameters of the model are updated in backward from the next one on."""
        self.optimizer.add_param_group(param_group)
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
        groups = [stage.group for stage in self._stages if stage.group is not None]
        return groups[0] if groups else dist.group.WORLD  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizer"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"OverlappedOptimizer({self.optimizer!r})"

    # What a Step stage uses.

    @property
    def stepper(self) -> SubsetStepper:
        """Steps parts of the parameters."""
        return self._stepper

    def adopt(self, stage: Step) -> None:
        """Have :meth:`step` finish what ``stage`` leaves.

        Raises:
            ConfigurationError: another stage updates this optimizer in another way.
        """
        for other in self._stages:
            if (other.is_deferred, other.clipping) != (stage.is_deferred, stage.clipping):
                raise ConfigurationError(f"one optimizer is updated in one way, but has {other!r} and {stage!r}")
        if stage not in self._stages:
            self._stages.append(stage)

    def release(self, stage: Step) -> None:
        """Forget ``stage``."""
        if stage in self._stages:
            self._stages.remove(stage)

    def has_applied(self, parameter: Tensor) -> bool:
        """Whether ``.grad`` of this parameter has been applied."""
        return id(parameter) in self._applied

    def note_applied(self, parameters: list[Tensor]) -> None:
        """``.grad`` of these parameters has been applied."""
        self._applied.update(map(id, parameters))

    def note_new_gradients(self, parameters: list[Tensor]) -> None:
        """``.grad`` of these parameters is no longer what was applied."""
        self._applied.difference_update(map(id, parameters))
