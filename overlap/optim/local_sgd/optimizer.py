"""Local SGD: the optimizer of the training loop."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_ddp, check_group, is_one_of
from overlap._torch.ddp import before_final_sync
from overlap._torch.join import is_joining, used_in_shadow
from overlap._torch.optimizer import step_hooks
from overlap.errors import ConfigurationError, OverlapError, RegistrationError, TrainingLoopError
from overlap.hooks import Bucket, Role, Stage, StageContext, chain, wires
from overlap.hooks.post_local_sgd import PostLocal, PostLocalSGDState
from overlap.hooks.states import alike_in, under, warn_of_memory
from overlap.hooks.wires import Wire
from overlap.join.context import active_join, refuse_before_model, refuse_once_joined
from overlap.optim.lifecycle import SCALED_UNDER_JOIN, Form, Phase, UpdateLifecycle, report_refusals
from overlap.optim.local_sgd.averager import Averager, MakeOptimizer
from overlap.optim.local_sgd.inner import AveragingOptimizer, SeveralOptimizers
from overlap.optim.optimizer import OverlappedOptimizer
from overlap.optim.stepper import FoundInf, StepGuard
from overlap.optim.update import in_its_chain

_KEY = "local_sgd"
_OF_RANKS = "the model of each rank, which is its own in the middle of a round,"

_FORM = Form("local.step()", "LocalSGD", is_deferred=True)


class LocalSGD(AveragingOptimizer, Joinable):
    """Trains with plain DDP until ``start_step``; then each rank trains alone, and they average every ``period`` steps.

    One counter of steps serves post-local SGD (Lin et al. 2018, https://arxiv.org/abs/1808.07217), SlowMo and DiLoCo
    (``outer``), and Streaming DiLoCo (``fragments``, ``overlap``; Douillard et al. 2025, arXiv 2501.18512). It
    registers a reducer with ``ddp``, and is the optimizer of the training loop. Parameters that require a gradient, and
    floating-point buffers, are averaged in place, half precision in fp32. ``param_groups``, ``state``, ``defaults`` and
    step hooks are the wrapped optimizer's.

    Args:
        ddp: the model; nothing else may be registered with it.
        optimizer: the optimizer of each rank, on the model's parameters; or a list of several that :meth:`step` steps
            in turn, each with its own parameters, such as ``[muon, adamw]``.
        period: steps from one average to the next; ``local.averager.period = 16`` changes it from the next round on.
        start_step: steps of plain DDP before; where ``None`` 1000, and 0 with ``outer``.
        subgroup: the ranks that go on averaging gradients after it: a process group that this rank is in,
            ``"machine"`` for the ranks on one machine, ``None`` for no averaging.
        reducer: how gradients are averaged, ``AllReduce()`` where ``None``.
        overlap: ``True`` makes an average while the next step runs, a number ``n`` while the next ``n`` steps run;
            the updates that a rank makes meanwhile are kept: new = average + (current - snapshot).
        outer: a function from a list of tensors to an optimizer of them, which steps with the change of a round as its
            gradient; :attr:`outer` is that optimizer.
        fragments: cut the model into this many fragments, and average one of them each time, in turn.
        wire: how averages of parameters travel, such as ``Int4()``: as changes since the last average, of which each
            rank keeps a copy. Ranks have the same parameters after it, bit for bit. Buffers travel in full precision.
        error_feedback: add the rounding errors of an average to the next; takes an fp32 copy of the parameters.

    Communication, when ranks average: one all-reduce for about each 8 MB, on the model's process group from
    :meth:`step`, or with ``overlap`` in the background. With ``wire`` a send and a receive with every other rank and an
    all-gather.

    Raises:
        ConfigurationError: an argument is out of range, two do not fit together, or optimizer and model do not.
        UnsupportedError: ``outer`` or ``wire`` does not work with this model.
        RegistrationError: the model takes no registration; or :meth:`remove` was called before ``step()``.
        TrainingLoopError: ``step()`` comes after a backward that raised, or that did not reach every parameter.

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
        period: int = 8,
        start_step: int | None = None,
        subgroup: dist.ProcessGroup | str | None = None,
        *,
        reducer: Stage | None = None,
        overlap: bool | int = False,
        outer: MakeOptimizer | None = None,
        fragments: int = 1,
        wire: Wire | None = None,
        error_feedback: bool = False,
    ) -> None:
        ddp = check_ddp(ddp)
        if isinstance(optimizer, OverlappedOptimizer):
            raise ConfigurationError(
                "LocalSGD updates in its own step(), and this OverlappedOptimizer in a stage: use "
                "LocalSGD(ddp, optimizer) with the plain optimizer"
            )
        super().__init__(optimizer)
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = ddp.process_group
        if start_step is None:
            start_step = 1000 if outer is None else 0
        given = None if is_one_of(subgroup, "machine") else check_group('subgroup (or "machine")', subgroup)
        if given is not None:
            whole = set(dist.get_process_group_ranks(self.process_group))
            if strangers := sorted(set(dist.get_process_group_ranks(given)) - whole):
                raise ConfigurationError(f"ranks {strangers} of the subgroup are not in the model's process group")
        self.averager = Averager(
            self,
            ddp,
            self.optim,
            period=period,
            start_step=start_step,
            overlap=int(overlap) if isinstance(overlap, bool) else overlap,
            outer=outer,
            fragments=fragments,
            wire=wire,
            error_feedback=error_feedback,
        )
        """Makes the averages."""
        self._ddp = weakref.ref(ddp)
        self._always_syncs = bool(subgroup is not None or ddp.static_graph)
        self._join: _LocalJoinHook | None = None
        self._stage = _LocalSGDStage(self)
        state = _AveragersState(
            self.process_group,
            given,
            start_step,
            post_local_gradient_allreduce=subgroup is not None,
        )
        state.averager = self.averager
        self.registration = chain(PostLocal(state, reducer), self._stage).register(ddp)
        """The registration with the model; :meth:`remove` takes it out."""

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, to schedule its learning rate; ``None`` where there is none."""
        return self.averager.outer

    def _step_and_average(self) -> None:
        _ = self._stage.context  # Raises once it is removed.
        refuse_before_model(self, lambda: (ddp := self._ddp()) is not None and is_joining(ddp))
        Join.notify_join_context(self)
        lifecycle = self._stage.lifecycle
        with report_refusals([lifecycle]):
            is_scaled = FoundInf.given_to(self).found_inf is not None
            if is_scaled and self.is_joining and not self.averager.is_local:
                raise TrainingLoopError(SCALED_UNDER_JOIN)
            lifecycle.check_step()
            try:
                self.step_wrapped()
            except BaseException:
                lifecycle.on_update_failure()
                raise
            lifecycle.on_step(verdict=FoundInf.given_to(self))
        self._end_step(is_own=True)

    def _end_step(self, *, is_own: bool) -> None:
        self.averager.end_step(self._stage.context, is_own=is_own, is_joining=self.is_joining)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; between backward and :meth:`step` it discards the backward."""
        with report_refusals([self._stage.lifecycle]):
            self._stage.lifecycle.on_zero_grad()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Average the whole model over all ranks now, and begin a new round; every rank calls it between two steps.

        For one model to evaluate or save. It changes nothing where ranks have the same parameters already: before
        ``start_step``, and in fragments that were averaged after the last step, which an outer momentum would move.

        Raises:
            TrainingLoopError: inside of a ``Join``, when a rank has run out of inputs.
        """
        refuse_once_joined(self.process_group, "local.synchronize()")
        self.averager.synchronize(self._stage.context, is_joining=self.is_joining)

    def remove(self) -> None:
        """Apply a pending average and leave the model to plain DDP; on every rank between two steps."""
        self.registration.remove()

    # Join.

    @property
    def steps_alone(self) -> bool:
        """Whether the next step is this rank's own, and not the same on every rank."""
        return self.averager.is_local

    @property
    def is_joining(self) -> bool:
        """Whether this runs under ``with Join([ddp, local])``."""
        return self._join is not None and self._join.is_open and bool(self._join_config.enable)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Keeps a rank that has run out of inputs in the averages, with the weight of the steps that it made."""
        if self._join is not None:
            self._join.stop_watching()
        self._join = _LocalJoinHook(self)
        return self._join

    @property
    def join_device(self) -> torch.device:
        return self._stage.context.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which a plain optimizer loads too, with a ``local_sgd`` entry.

        Ranks differ between two averages, so each saves its own, with its own model's. Waits for a pending average.
        """
        own = {**self.averager.state_dict(), "stages": self.registration.stage.state_dict()}
        warn_of_memory(lambda: any(own["own_steps"]), _OF_RANKS)
        return {**self.optim.state_dict(), _KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on this rank; or a plain optimizer's, with a warning.

        Raises:
            ConfigurationError: it is of other settings, of another model or of another rank.
        """
        if state_dict.get(_KEY) is not None:
            self.averager.check(state_dict[_KEY])
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        if (own := state_dict.get(_KEY)) is None:
            warnings.warn(
                f"the state has no step of local SGD, which stays at step {self.averager.step}: load the "
                "result of local.state_dict()",
                UserWarning,
                stacklevel=2,
            )
            return
        warn_of_memory(lambda: any(own["own_steps"]), _OF_RANKS)
        self.averager.load_state_dict(own)
        if "stages" in own:  # overlap.state_dict has them beside the optimizer.
            self.registration.stage.load_state_dict(own["stages"])

    @staticmethod
    def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """The :meth:`state_dict` of ``rank`` of ``ranks``, from those of all old ranks, in their order.

        They must have been saved after ``local.synchronize()``, when ranks have one model. The optimizer's state is
        that of old rank ``rank`` modulo their number; the errors of a wire are added up, see
        :func:`overlap.hooks.wires.redistribute`.

        Raises:
            ConfigurationError: ``rank`` is out of range, a state is missing or was saved in the middle of a round, or
                states do not belong together.
        """
        if not states:
            raise ConfigurationError("redistribute needs the state of every old rank, and was given none")
        own, memories = under(states, _KEY), under(under(states, _KEY), "wire")
        looked_at = sorted({rank % len(states), *range(rank, len(states), ranks)})
        for old in looked_at:
            if own[old]["flight"] or any(own[old]["own_steps"]):
                raise ConfigurationError(
                    f"the state of old rank {old} was saved in the middle of a round, when ranks have different "
                    "models: resume once with as many ranks as before, and call local.synchronize() before saving"
                )
        has_memory = {bool(memories[old]) for old in looked_at}
        if len(has_memory) > 1:
            raise ConfigurationError("some of the states are of runs with a wire, and others without")
        base = alike_in(states, rank, but=())
        if has_memory == {True}:
            wire = wires.redistribute(memories, rank=rank, ranks=ranks)
            base[_KEY] = {**alike_in(own, rank, but=("wire",)), "wire": wire}
        return base

    def __repr__(self) -> str:
        name = self.optim if isinstance(self.optim, SeveralOptimizers) else type(self.optim).__name__
        return f"LocalSGD({name}, {self.averager!r})"


class _AveragersState(PostLocalSGDState):
    """Passes are local when the averager says so."""

    averager: Averager

    @property
    def is_local(self) -> bool:
        return self.averager.is_local


class _LocalSGDStage(Stage):
    """Notifies a :class:`LocalSGD` of its model's forwards and backwards; averages are made in ``LocalSGD.step``."""

    role = Role.AVERAGER
    tells_of_steps = True

    def __init__(self, local: LocalSGD) -> None:
        self._local = local
        # Gradients stay until the loop clears them.
        self.lifecycle = UpdateLifecycle(_FORM, clears=lambda parameter: True)
        """Of the update that ``LocalSGD.step`` makes."""
        self._context: StageContext | None = None
        self.holds_mean = False
        """Whether the mean of the pass under way is to be kept in ``held``: DDP sets no ``.grad`` in a replay."""
        self.held: dict[Tensor, Tensor] = {}
        self._is_off = False
        self._guards: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def context(self) -> StageContext:
        """Where it is registered.

        Raises:
            RegistrationError: it was removed.
        """
        if self._context is None:
            raise RegistrationError("this LocalSGD was removed from its model; make another one")
        return self._context

    @property
    def signature(self) -> str:
        return repr(self._local)

    def check_position(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        self.lifecycle.form = in_its_chain(self.lifecycle.form, before)

    def attach(self, context: StageContext) -> None:
        self._context = context
        if (wire := self._local.averager.wire) is not None:
            wire.memory.attach(context)
        self.lifecycle.attach(replace(context, is_joining=lambda: False))  # This rank averages with the others.
        guard, optim = StepGuard(self, through=self._local, instead="never average"), self._local.optim
        several = optim.optimizers if isinstance(optim, SeveralOptimizers) else [optim]
        self._guards = [one.register_step_pre_hook(guard) for one in several]

    def detach(self) -> None:
        local = self._local
        for guard in self._guards:
            guard.remove()
        self.lifecycle.on_remove()
        with contextlib.suppress(OverlapError):  # Where the average failed, its error was raised.
            local.averager.apply_pending()
        if (wire := local.averager.wire) is not None:
            wire.memory.detach()
        self._synchronize_gradients(True)
        if local._join is not None:
            local._join.stop_watching()
        self._context = None

    async def __call__(self, bucket: Bucket) -> None:
        """Nothing to do to a bucket: parameters are averaged when all are updated."""
        if self.holds_mean:
            self.held.update(zip(bucket.parameters, [each.clone() for each in bucket.gradients], strict=True))
        self.lifecycle.gradients.reduced.update({id(parameter): parameter for parameter in bucket.parameters})

    def before_forward(self) -> None:
        local = self._local
        self.lifecycle.on_forward()
        local.averager.begin_step()
        # A rank that trains alone needs nothing from DDP, and saves the copies into and out of its buckets; but under
        # Join, only DDP tells joined ranks of a step.
        self._synchronize_gradients(local._always_syncs or local.is_joining or not local.averager.is_local)

    def _synchronize_gradients(self, is_on: bool) -> None:
        """Whether the next forward and its backward go with the other ranks, buffers included, as by ``no_sync``.

        That sets the first attribute for a block of code, which a phase of a loop is not; DDP copies it to the second
        one forward later. Nothing is set while it was never off, so that the loop's ``no_sync`` works.
        """
        if (self._is_off or not is_on) and (ddp := self._local._ddp()) is not None:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = is_on
        self._is_off = not is_on

    def before_backward(self, *, is_replay: bool) -> None:
        local = self._local
        if is_replay:
            if local._join is None or not local.is_joining:
                raise TrainingLoopError("LocalSGD acts outside of backward, too: use `with Join([ddp, local])`")
            local._join.has_replayed = True
        local.averager.begin_step()
        # PyTorch's Join leaves no .grad on a rank without inputs; ours leaves the mean.
        self.holds_mean = is_replay and not local.steps_alone and active_join(local.process_group) is None
        self.lifecycle.on_backward(is_replay=is_replay)

    def after_backward(self, *, failed: bool) -> None:
        if failed:
            self.lifecycle.on_failure()
        else:
            self.lifecycle.on_reduced(Phase.STEPPED if self.lifecycle.is_replay else None)

    def __repr__(self) -> str:
        return f"Average({self._local.averager!r})"


class _LocalJoinHook(JoinHook):
    """Shadows ``local.step()`` on a rank that has run out of inputs; DDP's own hook replays backward.

    DDP ends a ``Join`` by copying one rank's model to all, so the last average is made right before that.
    """

    def __init__(self, local: LocalSGD) -> None:
        self._local = local
        self.is_open = True
        self.has_replayed = False
        self.stop_watching: Callable[[], None] = lambda: None
        if (ddp := local._ddp()) is not None:
            self.stop_watching = before_final_sync(ddp, self.post_hook)

    def main_hook(self) -> None:
        """The collectives of one step of the other ranks; none where they only accumulate gradients."""
        local = self._local
        if not self.has_replayed:
            return
        self.has_replayed = False
        if local.steps_alone:
            local._end_step(is_own=False)
            return
        ddp, held = local._ddp(), local._stage.held
        if held and ddp is not None:
            used = used_in_shadow(ddp)
            for parameter, mean in held.items():
                parameter.grad = mean if used is None or id(parameter) in used else None
            held.clear()
        before, after = step_hooks(local)
        for hook in before:
            hook(local, (local,), {})
        local.step_wrapped()
        local._end_step(is_own=False)
        for hook in after:
            hook(local, (local,), {})

    def post_hook(self, is_last_joiner: bool = True) -> None:
        if self.is_open:
            self._local.averager.synchronize(self._local._stage.context, is_joining=self._local.is_joining)
            self.is_open = False
            self.stop_watching()
