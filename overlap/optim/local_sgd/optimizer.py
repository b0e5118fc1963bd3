"""Local SGD: the optimizer of the training loop."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_ddp, is_one_of, refuse_capture
from overlap._torch.ddp import GradientSync
from overlap._torch.join import is_joining
from overlap._torch.joined_ddp import used_in_shadow
from overlap._torch.optimizer import run_post_hooks, run_pre_hooks
from overlap.errors import ConfigurationError, OverlapError, TrainingLoopError
from overlap.hooks import Stage, StageContext, chain
from overlap.hooks.post_local_sgd import PostLocal, PostLocalSGDState, check_subgroup
from overlap.hooks.wires import Wire
from overlap.join.adapters import once_after
from overlap.join.joinable import refuse_before_model
from overlap.join.participation import active_join, refuse_once_joined
from overlap.optim.lifecycle import UpdateLifecycle, refusals_told
from overlap.optim.local_sgd.anchors import Anchors
from overlap.optim.local_sgd.averaging_optimizer import AveragingOptimizer
from overlap.optim.local_sgd.compressed import check_real
from overlap.optim.local_sgd.join_hook import LocalSGDJoinHook
from overlap.optim.local_sgd.model_tensors import ModelTensors, trained_parameters
from overlap.optim.local_sgd.options import Options
from overlap.optim.local_sgd.outer import MakeOptimizer, OuterOptimizer
from overlap.optim.local_sgd.redistribution import redistribute
from overlap.optim.local_sgd.schedule import Period, Schedule
from overlap.optim.local_sgd.several import name_of
from overlap.optim.local_sgd.stages import LocalSGDStage, check_transforms, check_update
from overlap.optim.local_sgd.synchronizer import Synchronizer
from overlap.optim.phases import SCALED_UNDER_JOIN, Form, Phase
from overlap.optim.scaler import LossScale
from overlap.optim.update import check_unscaled

__all__ = ["LocalSGD"]

_KEY = "local_sgd"

_FORM = Form(outcome=Phase.REDUCED, step="local.step()", deferred="LocalSGD without update")


class LocalSGD(AveragingOptimizer, Joinable):
    """Trains with plain DDP until ``start_step``; then each rank trains alone, and they average every ``period`` steps.

    One counter of steps serves post-local SGD and hierarchical local SGD (Lin et al. 2018,
    https://arxiv.org/abs/1808.07217), SlowMo and DiLoCo (``outer``), and Streaming DiLoCo (``fragments``, ``overlap``;
    Douillard et al. 2025, arXiv 2501.18512). It registers with ``ddp`` what reduces gradients, and is the optimizer of
    the training loop::

        ddp = DistributedDataParallel(model)
        local = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=8, start_step=1000)
        ...
        local.zero_grad(); loss_fn(ddp(x), y).backward(); local.step(); scheduler.step()

    Parameters are averaged in place and keep their storage. ``param_groups``, ``state``, ``defaults`` and step hooks
    are the wrapped optimizer's. Parameters that are frozen at construction are not averaged.

    Args:
        ddp: the model; nothing else may be registered with it.
        optimizer: the optimizer of each rank, on the model's parameters; or a list of several that :meth:`step` steps
            in turn, each with its own parameters, such as ``[muon, adamw]``.
        period: steps from one average to the next; ``{4: 2, 16: 8}`` averages in groups of 2 every 4 steps and of 8
            every 16; a function, the same on every rank, is called with the step at which a round begins and returns
            the round's length.
        start_step: steps of plain DDP before.
        subgroup: the ranks that go on averaging gradients after it: a process group that this rank is in,
            ``"machine"`` for the ranks on one machine, ``None`` for no averaging.
        update: a stage that updates in backward, ``Step(optimizer)`` with ``optimizer`` an ``OverlappedOptimizer``.
        reducer: how gradients are averaged, ``AllReduce()`` where ``None``.
        transforms: stages between the reducer and the update, such as ``ClipGradNorm(1.0)``; where ranks train alone
            they see this rank's own gradients.
        overlap: ``True`` makes an average while the next step runs, a number ``n`` while the next ``n`` steps run;
            the updates that a rank makes meanwhile are kept: new = average + (current - snapshot).
        outer: a function from a list of tensors to an optimizer of them, which steps with what a round changed as
            its gradient.
        fragments: cut the model into this many fragments, and average one of them each time, in turn.
        average_buffers: average floating-point buffers too, such as BatchNorm's statistics.
        optimizer_state: at an average, ``"keep"`` each rank's own, ``"average"`` it too, or ``"reset"`` it.
        average_dtype: sum in this dtype where it is wider than a parameter's: ``torch.float32`` for half precision.
        wire: how averages of parameters travel, such as ``Int4()``: as changes since the last average of all ranks, of
            which each rank keeps a copy (the outer optimizer's, where there is one). All ranks have the same parameters
            after it, bit for bit. Buffers and optimizer state are averaged in full precision; and so are smaller groups
            of a hierarchy, with messages between the largest of them when all ranks average.
        error_feedback: add what the wire left out of one average to the next; takes an fp32 copy of the parameters.

    Issues, when ranks average: one all-reduce for about each 8 MB of parameters; on the model's process group from
    :meth:`step`, or with ``overlap`` in the background. With ``wire``, a send and a receive with every other rank and
    an all-gather, as :class:`Quantize` does. With ``wire`` or ``outer`` the first time also an all-reduce of two
    numbers per parameter.

    Raises:
        ConfigurationError: an argument is out of range, two do not fit together, or optimizer and model do not.
        UnsupportedError: ``update`` or ``outer`` does not work with this model.
        RegistrationError: the model takes no registration.

    >>> local = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=8, start_step=1000)
    >>> for x, y in loader:
    ...     local.zero_grad()
    ...     loss_fn(ddp(x), y).backward()
    ...     local.step()
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        period: Period = 8,
        start_step: int = 1000,
        subgroup: dist.ProcessGroup | str | None = None,
        *,
        update: Stage | None = None,
        reducer: Stage | None = None,
        overlap: bool | int = False,
        outer: MakeOptimizer | None = None,
        fragments: int = 1,
        average_buffers: bool = True,
        optimizer_state: str = "keep",
        average_dtype: torch.dtype | None = None,
        wire: Wire | None = None,
        error_feedback: bool = False,
        transforms: Sequence[Stage | Callable[..., Any]] = (),
    ) -> None:
        ddp = check_ddp(ddp)
        super().__init__(optimizer)
        optimizer = self.optim
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = ddp.process_group
        options = Options(
            overlap=overlap, fragments=fragments, average_buffers=average_buffers, optimizer_state=optimizer_state,
            average_dtype=average_dtype, wire=wire, error_feedback=error_feedback,
        )  # fmt: skip
        if not is_one_of(subgroup, None, "machine"):
            check_subgroup(subgroup, self.process_group)
        check_update(update, optimizer, ddp)
        tensors = ModelTensors(
            ddp.module, trained_parameters(ddp, optimizer), optimizer, fragments=fragments, buffers=average_buffers,
            state=optimizer_state == "average",
        )  # fmt: skip
        if wire is not None:
            check_real(tensors.parameters)
        anchors: Anchors | None = None
        if outer is not None:
            anchors = OuterOptimizer(outer, tensors.parameters, average_dtype)
        elif wire is not None:
            anchors = Anchors(tensors.parameters, average_dtype)
        schedule = Schedule(period, start_step, self.process_group, has_wire=wire is not None)
        if schedule.levels > 1 and (outer is not None or fragments > 1):
            raise ConfigurationError("outer and fragments need one period for all ranks, and period is a hierarchy")
        self.synchronizer = Synchronizer(schedule, tensors, options, anchors)
        """Makes the averages."""
        self._ddp = weakref.ref(ddp)
        self._gradient_sync = GradientSync(ddp)
        self._transforms = check_transforms(transforms)
        self._always_syncs = bool(subgroup is not None or update is not None or ddp.static_graph or self._transforms)
        self._join: LocalSGDJoinHook | None = None
        # An update in backward has a lifecycle of its own. Without one gradients stay until the loop clears them.
        self._lifecycle = None if update is not None else UpdateLifecycle(_FORM, clears=lambda parameter: True)
        self._stage = LocalSGDStage(
            signature=repr(self),
            summary=f"{schedule.summary}{options.summary}",
            lifecycle=self._lifecycle,
            before_forward=self._before_forward,
            before_backward=self._before_backward,
            on_detach=self._on_detach,
        )
        state = PostLocalSGDState(
            self.process_group,
            None if isinstance(subgroup, str) else subgroup,
            start_step,
            post_local_gradient_allreduce=subgroup is not None,
        )
        reduce = PostLocal(state, reducer, is_local=lambda: schedule.is_local)
        self.registration = chain(
            reduce, *self._transforms, *([] if update is None else [update]), self._stage
        ).register(ddp)
        """What is registered with the model; :meth:`remove` takes it out."""

    @property
    def step_count(self) -> int:
        """Training steps so far."""
        return self.schedule.step

    @property
    def schedule(self) -> Schedule:
        """Counts steps, and says when ranks average."""
        return self.synchronizer.schedule

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, to schedule its learning rate."""
        return None if self.synchronizer.outer is None else self.synchronizer.outer.optimizer

    @property
    def context(self) -> StageContext:
        """Where it is registered."""
        return self._stage.context

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, then average if it is time; returns the closure's result.

        Raises:
            RegistrationError: :meth:`remove` was called.
            TrainingLoopError: the last backward raised, or did not reach every parameter.
            ConfigurationError: ``period`` returned an impossible length, or ranks differ in the state to average.
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture("LocalSGD.step()", "call it outside of the capture")
        _ = self.context  # Raises once it is removed.
        refuse_before_model(self, lambda: (ddp := self._ddp()) is not None and is_joining(ddp))
        if closure is None:
            Join.notify_join_context(self)
        elif self.is_joining:
            closure = once_after(closure, lambda: Join.notify_join_context(self))
        with self._refusals_told():
            loss = self._update(closure)
        self._end_step(is_own=True)
        return loss

    def _refusals_told(self) -> contextlib.AbstractContextManager[None]:
        return refusals_told([] if self._lifecycle is None else [self._lifecycle])

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        lifecycle = self._lifecycle
        if lifecycle is None:
            return self.step_wrapped(closure)
        if LossScale.given_to(self).is_used:
            if self.is_joining and not self.schedule.is_local:
                raise TrainingLoopError(SCALED_UNDER_JOIN)
            check_unscaled(self._transforms, "Clip in the loop, after scaler.unscale_(local)")

        def checked_closure() -> Any:
            assert closure is not None
            loss = closure()
            lifecycle.check_step()
            return loss

        if closure is None:
            lifecycle.check_step()
        try:
            loss = self.step_wrapped(None if closure is None else checked_closure)
        except BaseException:
            lifecycle.on_update_failure()
            raise
        lifecycle.on_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; between backward and :meth:`step` it discards the backward.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where ``update`` was made in backward.
        """
        if self._lifecycle is not None:
            with self._refusals_told():
                self._lifecycle.on_zero_grad()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Average the whole model over all ranks now, and begin a new round; every rank calls it between two steps.

        For one model to evaluate or save. It changes nothing where ranks have the same parameters already: before
        ``start_step``, and in fragments that were averaged after the last step, which an outer momentum would move.

        Raises:
            TrainingLoopError: inside of a ``Join``, when a rank has run out of inputs.
        """
        refuse_once_joined(self.process_group, "local.synchronize()")
        self._synchronize()

    def _synchronize(self) -> None:
        self.synchronizer.synchronize(self.context, is_joining=self.is_joining)

    def remove(self) -> None:
        """Apply a pending average and leave the model to plain DDP; on every rank between two steps."""
        self.registration.remove()

    def _before_forward(self) -> None:
        self.synchronizer.begin_step()
        # A rank that trains alone needs nothing from DDP, and saves the copies into and out of its buckets; but under
        # Join, DDP is what tells joined ranks of a step.
        self._gradient_sync.switch(is_on=self._always_syncs or self.is_joining or not self.schedule.is_local)

    def _before_backward(self, is_replay: bool) -> None:
        if is_replay:
            if self._join is None or not self.is_joining:
                raise TrainingLoopError("LocalSGD acts outside of backward, too: use `with Join([ddp, local])`")
            self._join.has_replayed = True
        self.synchronizer.begin_step()
        # PyTorch's Join leaves no .grad on a rank without inputs; ours leaves the mean.
        self._stage.holds_mean = is_replay and not self.steps_alone and active_join(self.process_group) is None

    @property
    def steps_alone(self) -> bool:
        """Whether the next step is this rank's own, and not the same on every rank."""
        return self._lifecycle is None or self.schedule.is_local

    def _follow_step(self) -> None:
        """A step of the ranks that have inputs, on one that has run out."""
        if self.steps_alone:
            self._end_step(is_own=False)
            return
        ddp, held = self._ddp(), self._stage.held
        if held and ddp is not None:
            used = used_in_shadow(ddp)
            for parameter, mean in held.items():
                parameter.grad = mean if used is None or id(parameter) in used else None
            held.clear()
        run_pre_hooks(self)
        self.step_wrapped(None)
        self._end_step(is_own=False)
        run_post_hooks(self)

    def _end_step(self, *, is_own: bool) -> None:
        self.synchronizer.end_step(self.context, is_own=is_own, is_joining=self.is_joining)

    def _on_detach(self) -> None:
        with contextlib.suppress(OverlapError):  # What made the average fail was raised where it happened.
            self.synchronizer.apply_pending()
        self._gradient_sync.switch(is_on=True)
        if self._join is not None:
            self._join.stop_watching()

    @property
    def is_joining(self) -> bool:
        """Whether this runs under ``with Join([ddp, local])``."""
        return self._join is not None and self._join.is_open and bool(self._join_config.enable)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Keeps a rank that has run out of inputs in the averages, with the weight of the steps that it made."""
        if self._join is not None:
            self._join.stop_watching()
        self._join = LocalSGDJoinHook(self._ddp(), self._follow_step, self._synchronize)
        return self._join

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        return self.context.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The model's."""
        return self.process_group

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which a plain optimizer loads too, with a ``local_sgd`` entry.

        Ranks differ between two averages, so each saves its own, with its own model's. Waits for a pending average.
        """
        own = {**self.synchronizer.state_dict(), "stages": self.registration.stage.state_dict()}
        return {**self.optim.state_dict(), _KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave on this rank; or a plain optimizer's, with a warning, at step 0.

        Raises:
            ConfigurationError: it is of other settings, or of another model.
        """
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        own = state_dict.get(_KEY)
        if own is None:
            warnings.warn(
                "the state has no step of local SGD: it starts again from step 0, its start_step included",
                UserWarning,
                stacklevel=2,
            )
            self.synchronizer.restart()
            return
        self.synchronizer.load_state_dict(own, self.context.device)
        self.registration.stage.load_state_dict(own["stages"])

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        outer = "" if self.outer is None else f", outer {type(self.outer).__name__}"
        options = self.synchronizer.options.summary
        return f"LocalSGD({name_of(self.optim)}, {self.schedule.summary}{outer}{options})"
