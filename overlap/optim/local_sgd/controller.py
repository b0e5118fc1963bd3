"""Local SGD from one counter."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._torch.ddp import before_final_sync, data_parallel_parameters, set_gradient_sync
from overlap.errors import ConfigurationError, OverlapError, RegistrationError, TrainingLoopError
from overlap.hooks import Stage, StageContext, chain
from overlap.hooks.post_local_sgd import PostLocal
from overlap.optim.local_sgd import checkpoint
from overlap.optim.local_sgd.averages import Averages
from overlap.optim.local_sgd.averaging import tensors_of
from overlap.optim.local_sgd.content import Content
from overlap.optim.local_sgd.joining import LocalSGDJoinHook
from overlap.optim.local_sgd.options import Options, check_subgroup
from overlap.optim.local_sgd.outer import MakeOptimizer, Outer
from overlap.optim.local_sgd.schedule import Period, Schedule
from overlap.optim.local_sgd.stage import Coordination, CountedState, UnlessReplayedAlone, check_update
from overlap.optim.local_sgd.wrapper import OptimizerAround

__all__ = ["LocalSGD"]


class LocalSGD(OptimizerAround, Joinable):
    """Trains with plain DDP until ``start_step``; from then on ranks train apart and average every ``period`` steps.

    Post-local SGD (Lin et al. 2018, https://arxiv.org/abs/1808.07217), hierarchical local SGD (there, too), SlowMo and
    DiLoCo (``outer``), Streaming DiLoCo (``fragments``, ``overlap``; Douillard et al. 2025, arXiv 2501.18512), all
    from one counter of steps. It registers what reduces gradients with ``ddp``, and is the optimizer of the loop::

        ddp = DistributedDataParallel(model)
        local = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=8, start_step=1000)
        ...
        local.zero_grad(); loss_fn(ddp(x), y).backward(); local.step(); scheduler.step()

    Parameters are averaged in place and keep their storage. ``param_groups``, ``state``, ``defaults`` and step hooks
    are the wrapped optimizer's. Parameters that are frozen when this is made are left alone.

    Args:
        ddp: the model; nothing else may be registered with it.
        optimizer: what each rank steps with, on the model's parameters.
        period: steps from one average to the next; ``{4: 2, 16: 8}`` averages in groups of 2 every 4 steps and of 8
            every 16; a function, the same on every rank, gives the length of the round that begins at the step that it
            is called with.
        start_step: steps of plain DDP before.
        subgroup: who goes on averaging gradients after it: a process group that this rank is in, ``"machine"`` for the
            ranks on one machine, ``None`` for each rank by itself.
        update: a stage that updates in backward, ``Step(optimizer)`` with ``optimizer`` an ``OverlappedOptimizer``.
        reducer: how gradients are averaged while they are, ``AllReduce()`` where ``None``.
        overlap: ``True`` lets an average be on its way while the next step runs, a number while so many steps run;
            what a rank learns meanwhile is kept: new = average + (current - snapshot).
        outer: makes an optimizer of a list of tensors, which steps with what a round changed as its gradient.
        fragments: average one of so many parts of the model each time, in turn.
        average_buffers: average floating-point buffers, too, such as BatchNorm's statistics.
        optimizer_state: ``"keep"`` each rank's own, ``"average"`` it with the parameters, or ``"reset"`` it then.
        average_dtype: sum in this dtype where it is wider than a parameter's: ``torch.float32`` for half precision.

    Issues, when ranks average: one all-reduce for about each 8 MB of parameters; on the model's process group from
    :meth:`step`, or with ``overlap`` behind backward.

    Raises:
        ConfigurationError: an argument is out of range, two do not fit together, or optimizer and model do not.
        RegistrationError: the model takes no registration.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
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
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigurationError(f"LocalSGD takes a DistributedDataParallel model, got {type(ddp).__name__}")
        super().__init__(optimizer)
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = ddp.process_group
        options = Options(
            overlap=overlap, fragments=fragments, average_buffers=average_buffers, optimizer_state=optimizer_state,
            average_dtype=average_dtype,
        )  # fmt: skip
        check_subgroup(subgroup, self.process_group)
        check_update(update, optimizer)
        self.subgroup = subgroup
        content = Content(
            ddp.module, _trained(ddp, optimizer), optimizer, fragments=fragments, buffers=average_buffers,
            state=optimizer_state == "average",
        )  # fmt: skip
        outer_step = None if outer is None else Outer(outer, content.parameters, average_dtype)
        schedule = Schedule(period, start_step, self.process_group)
        if schedule.levels > 1 and (outer is not None or fragments > 1):
            raise ConfigurationError("outer and fragments need one period for all ranks, and period is a hierarchy")
        self.averages = Averages(schedule, content, options, outer_step)
        """What is averaged, and when."""
        self._ddp = weakref.ref(ddp)
        self._has_update = update is not None
        self._is_in_join = self._has_replayed = self._has_parted = False
        self._unwatch: Callable[[], None] = lambda: None
        state = CountedState(self, subgroup)
        self._coordination = Coordination(self)
        stages: list[Stage] = [PostLocal(state, reducer)]
        stages += [] if update is None else [UnlessReplayedAlone(update, state)]
        self.registration = chain(*stages, self._coordination).register(ddp)
        """What is registered with the model; :meth:`remove` takes it out."""

    @property
    def step_count(self) -> int:
        """Training steps so far."""
        return self.schedule.step

    @property
    def schedule(self) -> Schedule:
        """Counts steps, and says when ranks average."""
        return self.averages.schedule

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, for a schedule of its rate."""
        return None if self.averages.outer is None else self.averages.outer.optimizer

    @property
    def context(self) -> StageContext:
        """Where it is registered."""
        if self._coordination.context is None:
            raise RegistrationError("this LocalSGD was removed from its model; make another one")
        return self._coordination.context

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, then average if it is time; returns the closure's result.

        Raises:
            RegistrationError: :meth:`remove` was called.
            ConfigurationError: ``period`` gave no round's length, or ranks differ in the state to average.
        """
        Join.notify_join_context(self)
        _ = self.context  # Raises once it is removed.
        loss = self.step_inner(closure)
        self._advance(is_own=True)
        return loss

    def synchronize(self) -> None:
        """Average now, all of the model over all ranks, and begin a new round; every rank calls it between two steps.

        To evaluate or save one model for all. Nothing happens to what ranks have in common: all of it before
        ``start_step``, and a fragment that was averaged after the last step, which an outer momentum would move on.
        """
        self.averages.synchronize(self.context, is_joining=self.is_joining)

    def remove(self) -> None:
        """Take an average in flight over and leave the model to plain DDP; on every rank between two steps."""
        self.registration.remove()

    # What the stage and the join hook tell.

    def before_forward(self) -> None:
        """A forward that records gradients begins."""
        self.averages.prepare()
        ddp = self._ddp()
        if ddp is None:
            return
        # A rank that trains by itself has nothing to ask DDP for, and saves the copies into and out of its buckets.
        # Under Join, DDP is what tells joined ranks of a step.
        is_apart = self._trains_alone and not (self._has_update or self.is_joining or ddp.static_graph)
        if is_apart or self._has_parted:
            set_gradient_sync(ddp, not is_apart)
        self._has_parted = is_apart

    def before_backward(self, *, is_replay: bool) -> None:
        """The first bucket of a backward pass arrives."""
        if is_replay and not self.is_joining:
            raise TrainingLoopError("LocalSGD acts outside of backward, too: use `with Join([ddp, local])`")
        self._has_replayed |= is_replay
        self.averages.prepare()

    def on_removed(self) -> None:
        """The stage is being detached."""
        with contextlib.suppress(OverlapError):  # Whatever ended the flight has been raised, or will not be missed.
            self.averages.land()
        if (ddp := self._ddp()) is not None and self._has_parted:
            set_gradient_sync(ddp, True)
        self._unwatch()
        self._coordination.context = None

    @property
    def _trains_alone(self) -> bool:
        return self.schedule.is_local and self.subgroup is None

    def _advance(self, *, is_own: bool) -> None:
        """A step has been made, by this rank or (under ``Join``) by others."""
        self.averages.advance(self.context, is_own=is_own, is_joining=self.is_joining)

    # Join.

    @property
    def is_joining(self) -> bool:
        """Whether this runs under ``with Join([ddp, local])``."""
        return self._is_in_join and bool(self._join_config.enable)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Keeps a rank that has run out of inputs in the averages, with the weight of the steps that it made."""
        self._is_in_join, self._has_replayed = True, False
        return LocalSGDJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        return self.context.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The model's."""
        return self.process_group

    def watch_end_of_join(self) -> None:
        """Have the last average made before DDP brings one rank's model to all."""
        if (ddp := self._ddp()) is not None:
            self._unwatch()
            self._unwatch = before_final_sync(ddp, self.end_join)

    def step_joined(self) -> None:
        """One step of the others, on a rank that has run out; none where they only accumulate."""
        if self._has_replayed:
            self._has_replayed = False
            self._advance(is_own=False)

    def end_join(self) -> None:
        """All ranks have run out: average what was learnt since the last time."""
        if self._is_in_join:
            self.synchronize()
            self._is_in_join = False
            self._unwatch()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which a plain one loads as well, with all of local SGD's own beside it.

        Ranks differ between two averages, so each saves its own, with its own model's; waits for an average in flight.
        """
        return {**self.optim.state_dict(), checkpoint.KEY: checkpoint.save(self.averages, self.registration.stage)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave on this rank, or the plain optimizer; warns where there is no step.

        Raises:
            ConfigurationError: it is of other settings, or of another model.
        """
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != checkpoint.KEY})
        checkpoint.load(self.averages, self.registration.stage, self.context, state_dict.get(checkpoint.KEY))

    def __repr__(self) -> str:
        outer = "" if self.outer is None else f", outer {type(self.outer).__name__}"
        return f"LocalSGD({type(self.optim).__name__}, {self.schedule.summary}{outer}{self.averages.options.summary})"


def _trained(ddp: DistributedDataParallel, optimizer: Optimizer) -> dict[str, Tensor]:
    """The model's parameters that are trained, by name.

    Raises:
        ConfigurationError: the optimizer has none of them.
    """
    trained = {name: p for p, name in data_parallel_parameters(ddp).items() if p.requires_grad}
    if not {id(p) for p in tensors_of(optimizer.param_groups)} & {id(p) for p in trained.values()}:
        raise ConfigurationError(
            f"the {type(optimizer).__name__} has no parameter of this model; build it from ddp.parameters()"
        )
    return trained
