"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from overlap._checks import check_group, refuse_capture
from overlap._torch import classes
from overlap._torch.c10d import backend_name
from overlap._torch.checkpoint import is_in_checkpointing, is_in_loading
from overlap._torch.device import has_streams
from overlap._torch.optimizer import has_post_hooks
from overlap._torch.state_dict_hooks import (
    after_load_state_dict,
    after_state_dict,
    before_load_state_dict,
    before_state_dict,
)
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.optim.grad_scaler import LossScale
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.phases import Event
from overlap.optim.probe import Verdict
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.subset import SubsetStepper
from overlap.optim.veto import Veto
from overlap.optim.zero.checkpoint import load_pieces, pieces_to_save
from overlap.optim.zero.consolidation import consolidate, load_plain
from overlap.optim.zero.division import Experiments, check_division, choose_partition, make_optimizer
from overlap.optim.zero.exchange import Exchange, Workspace
from overlap.optim.zero.offload import Offload, check_on_host
from overlap.optim.zero.parameter_groups import (
    check_class,
    check_master_dtype,
    check_members,
    copy_options,
    names_of,
    read_groups,
    with_names,
)
from overlap.optim.zero.sharding import Ownership, Shard, flatten
from overlap.optim.zero.state import ShardedState, check_new_state
from overlap.optim.zero.state_view import StateView
from overlap.optim.zero.strides import follow_strides
from overlap.optim.zero.whole_state import WholeState
from overlap.optim.zero.without_hooks import UpdateWithoutHooks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["ShardedUpdate", "ZeroRedundancyOptimizer"]


class ShardedUpdate(Protocol):
    """What the optimizer asks of the stage that updates it in backward."""

    lifecycle: UpdateLifecycle
    is_deferred: bool

    @property
    def updates_in_step(self) -> bool:
        """Whether the update is made in the optimizer's ``step()``."""

    @property
    def gathers_differences(self) -> bool:
        """Whether the gather writes the parameters on the ranks that own them, too."""

    def check_covers(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises: ConfigurationError: the stage's model does not train one of ``parameters``."""

    def step(self, loss_scale: LossScale) -> None:
        """Do what is left of the step after backward."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip what :meth:`step` is going to apply; returns the global norm."""

    def step_replayed(self) -> None:
        """The same on a rank that has run out of inputs."""

    def wait(self) -> None:
        """Wait for gathers that are under way."""


@classes.ZeroRedundancyOptimizer.register
class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """``optimizer_class`` with its state divided among the ranks: each of ``W`` ranks keeps and updates ``1/W``.

    This is ZeRO stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). With a :class:`ZeroStep` stage in
    DDP's backward it communicates as stage 2 does: a bucket is reduce-scattered, each rank updates what it owns, and
    the new parameters are gathered. Together these send as much as DDP's all-reduce::

        ddp = DistributedDataParallel(model)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
        chain(ZeroStep(zero)).register(ddp)
        ...
        loss.backward(); zero.step(); scheduler.step()

    Without a stage, :meth:`step` expects averaged gradients on every rank, updates what this rank owns and gathers the
    rest. ``param_groups`` hold the whole parameters, and the hyperparameters, which are read at every update.

    Args:
        params: parameters or groups of them, the same on every rank.
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        process_group: the ranks that divide the state; the default group if ``None``.
        parameters_as_bucket_view: accepted for compatibility; chunks are always views of the parameters.
        overlap_with_ddp: a stage makes the update in backward; :meth:`step` raises an error if none is registered.
        partition: ``"element"`` cuts every parameter into equal chunks, for optimizers that treat all elements alike,
            as most do. ``"parameter"`` gives whole parameters to ranks, balanced by what their updates cost, for other
            optimizers.
            ``None`` finds out, by an experiment on a few small parameters, which of them equals the plain optimizer.
        master_dtype: update a copy of each chunk in this dtype if it is wider than the parameter's, such as
            ``torch.float32`` for ``bfloat16`` parameters. Adds ``1/W`` of the parameters in that dtype on each rank.
        offload: keep the state of an accelerator's parameters in the CPU's memory, with a copy of this rank's part of
            them, and update there. Gradients and parameters of this rank's part are copied to the CPU, and parameters
            back, in each update. Changes nothing for parameters on the CPU, so put the model on its device first.
        **defaults: arguments of ``optimizer_class``.

    Issues: at construction one gather of a few bytes per parameter on ``process_group``, to compare the ranks.

    Raises:
        ConfigurationError: an argument is wrong, or the ranks have different parameters.
        UnsupportedError: the optimizer computes something from several parameters at once, or from several elements
            where ``partition`` cuts them; it draws random numbers; or a parameter has gaps in memory.
    """

    # GradScaler then leaves gradients as they are, always calls step(), and sets found_inf and grad_scale here.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: str | None = None,
        master_dtype: torch.dtype | None = None,
        offload: bool = False,
        **defaults: Any,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
        cls = check_class(optimizer_class)
        check_master_dtype(master_dtype)
        self.process_group: dist.ProcessGroup = check_group("process_group", process_group) or dist.group.WORLD  # type: ignore[assignment]
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.overlap_with_ddp = overlap_with_ddp
        groups = read_groups(params)
        self._experiments = Experiments(cls, defaults, master_dtype=master_dtype, offload=offload)
        self.separability = self._experiments.separability_of(groups)
        """How ``optimizer_class`` may be stepped."""
        self.partition = choose_partition(cls, self.separability, partition)
        self.ownership = Ownership(self.process_group, self.partition, master_dtype, offload=offload)
        self.stage: ShardedUpdate | None = None
        self._whole_state = WholeState(self.rank)
        self.skipped = SkippedUpdates()
        """Where the loop says that a backward is not this optimizer's."""
        chunks = self.ownership.add(
            groups,
            first_group=0,
            orthogonalizes=self._experiments.orthogonalizes(groups),
            blocks=self._experiments.state_blocks(groups),
        )
        self.optim = make_optimizer(cls, chunks, defaults)
        """The optimizer of ``optimizer_class`` that holds this rank's chunks."""
        self._stepper = SubsetStepper(self.optim)
        if self.ownership.is_on_host:
            check_on_host(self.optim)
        self.offload = Offload(self._step_owned) if self.ownership.is_on_host else None
        """What makes the updates on the CPU; ``None`` where they are made on the parameters' device."""
        sends_directly = backend_name(self.process_group, torch.device("cpu")) == "gloo"
        self.exchange = Exchange(sends_directly and not has_streams(self.ownership.device), Workspace())
        self._without_hooks = UpdateWithoutHooks(self.ownership, self.exchange)
        self._step_arguments: dict[str, Any] = {}
        self._state_sizes: dict[int, int] = {}
        self._is_complete = False
        Joinable.__init__(self)
        Optimizer.__init__(self, [with_names(group) for group in groups], self.optim.defaults)
        copy_options(self.optim.param_groups, self.param_groups)
        self._is_complete = True

    @property
    def state(self) -> defaultdict[Any, Any]:
        """This rank's part of the state; the keys are the whole parameters.

        What is removed from it, or set in it, is removed and set in the state itself. See :class:`StateView`.
        """
        return StateView(self.optim, self.shards, self._before_reset)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if self._is_complete:  # Optimizer.__init__ sets it, too.
            StateView(self.optim, self.shards, self._before_reset).replace(state)

    def _before_reset(self) -> None:
        if self.stage is not None:
            self.stage.lifecycle.check(Event.LOAD)
        self._whole_state.note_change()

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        return self.ownership.shards

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; a registered stage updates them from the next backward on.

        Raises:
            ConfigurationError: as at construction.
        """
        if not self._is_complete:
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, Mapping):
            raise ConfigurationError(f"param_group is a dict, got {type(param_group).__name__}")
        (group,) = groups = read_groups([param_group])
        found = self._experiments.separability_of([*self.param_groups, group])
        check_division(type(self.optim), found, self.partition)
        if self.stage is not None:
            self.stage.check_covers(group["params"], names_of(groups, first_group=len(self.param_groups)))
        (chunks,) = self.ownership.add(
            groups,
            first_group=len(self.param_groups),
            orthogonalizes=self._experiments.orthogonalizes([*self.param_groups, group])[-1:],
            blocks=self._experiments.state_blocks([*self.param_groups, group])[-1:],
        )
        self.optim.add_param_group(chunks)
        if self.offload is not None:
            check_on_host(self.optim)
        super().add_param_group(with_names(group))
        copy_options(self.optim.param_groups[-1:], self.param_groups[-1:])
        if not self._whole_state.is_untouched:
            self._whole_state.note_change()

    def follow_strides(self) -> None:
        """Bring the state into the order of parameters whose memory format was changed; call it on every rank."""
        follow_strides(ShardedState(self.optim, self.param_groups, self.shards, self.process_group))

    def begin(self) -> None:
        """Begin a step: take note of parameters that were moved or changed since the last one.

        Raises:
            ConfigurationError: parameters were put into the groups, or taken out, by hand.
        """
        check_members(self.param_groups, self.shards)
        self._stepper.begin()
        for shard in self.shards.values():
            shard.refresh()

    @torch.no_grad()
    def update(self, pairs: Sequence[tuple[Shard, Tensor]], veto: Veto) -> None:
        """Step what this rank owns of each shard with its flat gradient, and write the parameters, unless a gather of
        differences is going to. Where ``veto`` is left to the device, it changes nothing there."""
        if self.offload is not None:
            at_once = self.separability.in_turn.verdict is not Verdict.SEPARABLE
            self.offload.update(pairs, veto.found_inf, at_once=at_once)
            return
        with veto.passed_to(self.optim):
            self._step_owned(pairs)
        if self.stage is None or not self.stage.gathers_differences:
            for shard, _ in pairs:
                shard.publish()

    def _step_owned(self, pairs: Sequence[tuple[Shard, Tensor]]) -> None:
        self._whole_state.note_change()
        shards = [shard for shard, _ in pairs]
        chunks = [shard.own for shard in shards if shard.own is not None]
        shaped = [shard.shaped(gradient) for shard, gradient in pairs]
        matching = [g if g.dtype == own.dtype else g.to(own.dtype) for g, own in zip(shaped, chunks, strict=True)]
        copy_options(self.param_groups, self.optim.param_groups)
        # What step() does once, whatever it steps, is then done on ranks and in groups without a gradient, too.
        is_together = self.stage is None or self.stage.is_deferred
        is_whole = is_together and self.separability.in_turn.verdict is not Verdict.SEPARABLE
        self._stepper.step(chunks, matching, is_whole=is_whole, **self._step_arguments)
        copy_options(self.optim.param_groups, self.param_groups)
        if self.partition == "element":
            check_new_state(self.optim, shards, self._state_sizes)

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Finish the step: update what a stage has not updated in backward, and gather the parameters.

        With a stage whose updates are interleaved nothing is left to do, and the call returns at once.

        Args:
            closure: evaluates the model and runs backward, as for any optimizer; its result is returned.
            **arguments: of the ``step`` of ``optimizer_class``.

        Issues, on ``process_group``: nothing if interleaved; if deferred one gather per bucket, and one all-reduce of a
        number if gradients are clipped; without a stage, gathers of all trainable parameters.

        Raises:
            RegistrationError: ``overlap_with_ddp=True``, and no stage is registered.
            TrainingLoopError: a gradient has not been reduced, or ``GradScaler`` or ``arguments`` are used with
                interleaved updates.
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture("ZeroRedundancyOptimizer.step()", "call it outside of the capture")
        if is_in_checkpointing():
            self._make_state()
            return None
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_arguments(arguments)
        self._step_arguments = arguments
        try:
            self._finish_step()
        finally:
            self._step_arguments = {}
        return loss

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        if not arguments:
            return
        given = ", ".join(f"{key}=..." for key in arguments)
        if self.stage is not None and not self.stage.updates_in_step:
            raise TrainingLoopError(
                f"zero.step({given}): the update was made in backward, without these arguments; "
                "use ZeroStep(zero, deferred=True)"
            )
        if self.is_joining:
            raise TrainingLoopError(
                f"zero.step({given}): a rank that has run out of inputs does not have these arguments; call zero.step()"
            )

    def _finish_step(self) -> None:
        loss_scale = LossScale.given_to(self)
        if self.stage is not None:
            self.stage.step(loss_scale)
            if has_post_hooks(self):
                self.wait()  # They may read parameters.
        elif self.overlap_with_ddp:
            raise RegistrationError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True, but no stage updates it: "
                "call chain(ZeroStep(zero)).register(ddp), or leave out overlap_with_ddp"
            )
        else:
            self._step_without_hooks(loss_scale)

    @torch.no_grad()
    def _step_without_hooks(self, loss_scale: LossScale, *, is_joined: bool = False) -> None:
        self.follow_strides()
        self.begin()
        self._without_hooks.step(self.optim, self.update, loss_scale, is_joining=self.is_joining, is_joined=is_joined)

    @torch.no_grad()
    def _make_state(self) -> None:
        """Let the optimizer make the state of this rank's part by a step on zeros, which changes no parameter."""
        self.begin()
        owned = [shard for shard in self.shards.values() if shard.own is not None and shard.parameter.requires_grad]
        values = [shard.own.clone() for shard in owned if shard.own is not None]
        self._step_owned([(shard, flatten(torch.zeros_like(shard.own))) for shard in owned if shard.own is not None])
        for shard, value in zip(owned, values, strict=True):
            if shard.own is not None:
                shard.own.copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; between backward and :meth:`step` it discards the backward.

        A registered chain clears what it has applied by itself, so a loop need not call this.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        if self.stage is not None:
            self.stage.lifecycle.on_zero_grad(set_to_none=set_to_none)
        super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the mean gradients to at most this global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        Call it on every rank between backward and :meth:`step`. With a :class:`ZeroStep` that reduces by itself, only
        the owned part of ``.grad`` is the mean, so ``torch.nn.utils.clip_grad_norm_`` would clip by another norm on
        each rank. ``foreach`` is for kernels of the latter, where all of ``.grad`` is the mean.

        Issues: one all-reduce of two numbers per parameter, and one of a number; nothing where all of ``.grad`` is
            the mean.

        Returns:
            The global norm before clipping, a 0-dimensional tensor, the same on every rank. The ranks' parts are summed
            in float64, so it differs from that of plain DDP by the rounding of float32.

        Raises:
            TrainingLoopError: the update was made in backward, or there is no mean to clip; or the norm is not finite
                and ``error_if_nonfinite``; or gradients were scaled otherwise on one rank than on another.
            UnsupportedError: under ``Join``.
        """
        if self.stage is not None:
            return self.stage.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        parameters = [shard.parameter for shard in self.shards.values()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def skip_update(self) -> AbstractContextManager[None]:
        """``with zero.skip_update():`` for backwards of a loss that is not this optimizer's.

        A backward that begins inside reduces, and makes no update: as with ``ZeroStep(zero, deferred=True)``,
        :meth:`step` then applies it and :meth:`zero_grad` discards it. Enter it on every rank alike. See
        :meth:`OverlappedOptimizer.skip_update`; under ``Join`` it needs that form.
        """
        return self.skipped.skipping()

    def wait(self) -> None:
        """Wait until every parameter holds its new value, if gathers run during the next forward.

        Whoever looks a parameter up in the registered model waits for it, as ``module.weight``, ``parameters()``,
        ``state_dict()`` and deep copies do; so do saving and loading, step post-hooks and the end of a ``Join``. Call
        this before you read a parameter that you hold yourself, in a list or in ``param_groups``.
        """
        if self.stage is not None:
            self.stage.wait()

    @property
    def is_joining(self) -> bool:
        """Whether this runs under ``with Join([ddp, zero])``."""
        return bool(self._join_config.enable)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Goes on updating this rank's chunks after its last input; for ``with Join([ddp, zero])``."""
        return _JoinHook(self.step_joined, self.wait)

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        return self.ownership.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that divide the state."""
        return self.process_group

    def step_joined(self) -> None:
        """Issue the collectives of one :meth:`step` on a rank that has run out of inputs."""
        if self.stage is not None:
            self.stage.step_replayed()
        else:
            self._step_without_hooks(LossScale(), is_joined=True)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the whole state in CPU memory, for :meth:`state_dict` to return until the state changes.

        Call it on every rank. Issues: one gather of a few bytes per value, and gathers of at most about 64 MB of state
        each.

        Args:
            to: the rank of the group that gets the state; ``None`` for all ranks.

        Raises:
            ConfigurationError: the group has no rank ``to``.
            UnsupportedError: the optimizer's state cannot be put together from the ranks' parts.
        """
        self._whole_state.keep(consolidate(self._settled_state(), to))

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of the plain ``optimizer_class``; empty on ranks to which it was not consolidated.

        Before the first update every rank has it. Inside of ``torch.distributed.checkpoint``, whose functions every
        rank calls, the state is consolidated on all ranks.

        Raises:
            TrainingLoopError: :meth:`consolidate_state_dict` was not called since the last update.
        """
        before_state_dict(self)
        if is_in_loading() and not self.optim.state:
            self._make_state()
        if is_in_checkpointing():
            self.consolidate_state_dict(to=None)
        elif self._whole_state.is_untouched and not self.optim.state:
            self._whole_state.keep({"state": {}, **self._settled_state().local().shared.entries})
        packed = self._whole_state.packed(self.param_groups)
        return after_state_dict(self, packed) if packed else packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a :meth:`state_dict` of this class or of the plain optimizer, on every rank.

        Raises:
            ConfigurationError: it belongs to other parameters.
        """
        given, was_untouched = before_load_state_dict(self, state_dict), self._whole_state.is_untouched
        self.prepare_to_load()
        load_plain(self._settled_state(), given)
        if was_untouched and not given["state"]:
            # Accelerate loads what a new optimizer gave, which leaves it as it was.
            self._whole_state = WholeState(self.rank)
        after_load_state_dict(self)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part, for ``torch.distributed.checkpoint.save``; any number of ranks can load it.

        ::

            dcp.save({"model": ddp.module.state_dict(), "optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)
            ...
            zero.load_sharded(folder, key="optimizer")
        """
        return pieces_to_save(self._settled_state())

    def load_sharded(self, checkpoint: str | os.PathLike[str] | StorageReader, *, key: str = "") -> None:
        """Load a saved :meth:`sharded_state_dict`, of any number of ranks. Call it on every rank.

        Args:
            checkpoint: the ``checkpoint_id`` (a folder), or a reader of it.
            key: its key in the saved dict.

        Raises:
            ConfigurationError: nothing is saved there, or it belongs to other parameters.
        """
        self.prepare_to_load()
        load_pieces(self._settled_state(), checkpoint, key)

    def prepare_to_load(self) -> None:
        """The state is about to be replaced.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        if self.stage is not None:
            self.stage.lifecycle.on_load()
        self._whole_state.note_change()

    def _settled_state(self) -> ShardedState:
        """This rank's part of the state, after all gathers have ended."""
        self.wait()
        self.follow_strides()
        return ShardedState(self.optim, self.param_groups, self.shards, self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("a ZeroRedundancyOptimizer belongs to its process group; save its state instead")

    def __repr__(self) -> str:
        return f"ZeroRedundancyOptimizer({self.optim!r}, rank {self.rank} of {self.world_size})"


class _JoinHook(JoinHook):
    """Runs ``step`` on a rank that has run out of inputs. DDP's own hook runs what stages do in backward, and brings
    the last joiner's parameters to all ranks."""

    def __init__(self, step: Callable[[], None], wait: Callable[[], None]) -> None:
        self._step, self._wait = step, wait

    def main_hook(self) -> None:
        """The collectives of one step, as the active ranks issue them."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the block parameters are final."""
        self._wait()
