"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from overlap._checks import check_flag, check_group, refuse_capture
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
from overlap.hooks.transforms.clip import Clipping
from overlap.join.active import refuse_once_joined
from overlap.join.board import Agreement
from overlap.join.joinable import refuse_before_model
from overlap.optim.grad_scaler import LossScale
from overlap.optim.lifecycle import refusals_told
from overlap.optim.phases import Event
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.veto import Veto
from overlap.optim.zero.checkpoint import load_pieces, pieces_to_save
from overlap.optim.zero.conversion import (
    check_convertible,
    check_same_optimizer,
    constructor_arguments,
    copy_attributes,
)
from overlap.optim.zero.exchange import Exchange, Workspace
from overlap.optim.zero.join_hook import ZeroJoinHook
from overlap.optim.zero.local_optimizer import LocalOptimizer
from overlap.optim.zero.parameter_groups import (
    check_class,
    check_master_dtype,
    copy_options,
    names_of,
    read_groups,
    with_names,
)
from overlap.optim.zero.sharded_update import ShardedUpdate
from overlap.optim.zero.sharding import Shard
from overlap.optim.zero.state import ConsolidatedState, ShardedState, StateView
from overlap.optim.zero.without_hooks import UpdateWithoutHooks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["ZeroRedundancyOptimizer"]


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
            ``None`` takes the unit in which ``optimizer_class`` is known, or was declared, to update.
        master_dtype: update a copy of each chunk in this dtype if it is wider than the parameter's, such as
            ``torch.float32`` for ``bfloat16`` parameters. Adds ``1/W`` of the parameters in that dtype on each rank.
        **defaults: arguments of ``optimizer_class``.

    Communication: at construction one gather of a few bytes per parameter on ``process_group``, to compare the ranks.

    Raises:
        ConfigurationError: an argument is wrong, or the ranks have different parameters.
        PeerError: another rank raised one of these before they were compared.
        UnsupportedError: the optimizer is neither known nor declared (see :func:`overlap.declare`), or does not update
            elements by themselves where ``partition`` cuts parameters; or a parameter has gaps in memory.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    >>> chain(ZeroStep(zero)).register(ddp)
    <chain(ZeroStep(AdamW, interleaved)) registered>
    >>> scheduler = torch.optim.lr_scheduler.StepLR(zero, step_size=1)
    >>> for x, y in loader:
    ...     loss_fn(ddp(x), y).backward()
    ...     zero.step()
    ...     scheduler.step()

    An optimizer that exists already is sharded with its groups, defaults and state:

    >>> built = torch.optim.AdamW([{"params": list(ddp.parameters()), "weight_decay": 0.1}], lr=1e-3)
    >>> ZeroRedundancyOptimizer.from_optimizer(built).param_groups[0]["weight_decay"]
    0.1
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
        **defaults: Any,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
        self.process_group: dist.ProcessGroup = check_group("process_group", process_group) or dist.group.WORLD  # type: ignore[assignment]
        with Agreement(self.process_group, "make a ZeroRedundancyOptimizer") as agreement:
            check_flag("parameters_as_bucket_view", parameters_as_bucket_view)
            self._make(
                params, optimizer_class, defaults, agreement, overlap_with_ddp=overlap_with_ddp, partition=partition,
                master_dtype=master_dtype,
            )  # fmt: skip

    def _make(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        defaults: dict[str, Any],
        agreement: Agreement,
        *,
        overlap_with_ddp: bool,
        partition: str | None,
        master_dtype: torch.dtype | None,
    ) -> None:
        cls = check_class(optimizer_class)
        check_master_dtype(master_dtype)
        check_flag("overlap_with_ddp", overlap_with_ddp)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.overlap_with_ddp = overlap_with_ddp
        self._consolidated = ConsolidatedState(self.rank)
        groups = read_groups(params)
        self._local = local = LocalOptimizer(
            cls,
            groups,
            defaults,
            self.process_group,
            partition=partition,
            master_dtype=master_dtype,
            agreement=agreement,
            on_change=self._consolidated.note_change,
        )
        self.optim = local.optim
        """The optimizer of ``optimizer_class`` that holds this rank's chunks."""
        self.partition, self.ownership = local.partition, local.ownership
        self.update = local.update
        """Steps what this rank owns; not a method, since it is called for each bucket. See :class:`LocalOptimizer`."""
        self.finish = local.finish
        """Ends a step."""
        self._stage: ShardedUpdate | None = None
        self.skipped = SkippedUpdates()
        """Where the loop says that a backward is not this optimizer's."""
        sends_directly = backend_name(self.process_group, torch.device("cpu")) == "gloo"
        self.exchange = Exchange(sends_directly and not has_streams(self.ownership.device), Workspace())
        self._without_hooks = UpdateWithoutHooks(self.ownership, self.exchange)
        self._is_complete = False
        Joinable.__init__(self)
        Optimizer.__init__(self, [with_names(group) for group in groups], self.optim.defaults)
        copy_options(self.optim.param_groups, self.param_groups)
        self._is_complete = True

    @classmethod
    def from_optimizer(
        cls,
        optimizer: Optimizer,
        *,
        process_group: dist.ProcessGroup | None = None,
        overlap_with_ddp: bool = False,
        partition: str | None = None,
        master_dtype: torch.dtype | None = None,
    ) -> Self:
        """Shard an optimizer that exists already, such as one that a factory built or a checkpoint has filled.

        The new optimizer has its class, its groups with their hyperparameters, its defaults and its state, of which
        each rank keeps its part, and goes on as it would, bit for bit. Afterwards drop the old one, which still holds
        the whole state::

            zero = ZeroRedundancyOptimizer.from_optimizer(create_optimizer(model), overlap_with_ddp=True)
            chain(ZeroStep(zero)).register(ddp)

        Args:
            optimizer: of a known or declared class, the same on every rank. Wrappers of Accelerate and Lightning are
                unwrapped.
            process_group, overlap_with_ddp, partition, master_dtype: as of :class:`ZeroRedundancyOptimizer`.

        Communication: as at construction, and one gather of a few bytes per value of the state.

        Raises:
            ConfigurationError: ``optimizer`` is not a plain optimizer, or the ranks have different ones.
            UnsupportedError: as at construction; or it has hooks, a learning rate scheduler, a ``step()`` or an
                attribute of its own, which would be lost; or its state cannot be divided.
        """
        if not dist.is_initialized():
            raise ConfigurationError("ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
        group: Any = check_group("process_group", process_group) or dist.group.WORLD
        with Agreement(group, "convert an optimizer to a ZeroRedundancyOptimizer") as agreement:
            plain = check_convertible(optimizer)
            agreement.agree()
            check_same_optimizer(plain, group)
        zero = cls(
            plain.param_groups, type(plain), group, overlap_with_ddp=overlap_with_ddp, partition=partition,
            master_dtype=master_dtype, **constructor_arguments(plain),
        )  # fmt: skip
        zero.defaults.update(plain.defaults)
        copy_attributes(plain, zero.optim)
        if plain.state:
            zero.prepare_to_load()
            state = zero.sharded_state()
            dtypes = [shard.parameter.dtype for shard in state.shards]
            state.load(state.divided(plain.state_dict(), dtypes=dtypes))
        return zero

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of whole parameters."""
        return self._local.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._local.param_groups = groups

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
        self._consolidated.note_change()

    @property
    def stage(self) -> ShardedUpdate | None:
        """What updates in backward; ``None`` where nothing is registered."""
        return self._stage

    @stage.setter
    def stage(self, stage: ShardedUpdate | None) -> None:
        self._stage = stage
        self._local.publishes = stage is None or not stage.gathers_differences

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
        with Agreement(self.process_group, "add a group of parameters to a ZeroRedundancyOptimizer") as agreement:
            if not isinstance(param_group, Mapping):
                raise ConfigurationError(f"param_group is a dict, got {type(param_group).__name__}")
            (group,) = groups = read_groups([param_group])
            self._local.check_addition(group)
            if self.stage is not None:
                self.stage.check_covers(group["params"], names_of(groups, first_group=len(self.param_groups)))
            agreement.agree()
            self._local.add(group)
        super().add_param_group(with_names(group))
        copy_options(self.optim.param_groups[-1:], self.param_groups[-1:])
        if not self._consolidated.is_untouched:
            self._consolidated.note_change()

    def follow_strides(self) -> None:
        """Bring the state into the order of parameters whose memory format was changed; call it on every rank."""
        self.sharded_state().follow_strides()

    def begin(self) -> None:
        """Begin a step: take note of parameters that were moved or changed since the last one.

        Raises:
            ConfigurationError: parameters were put into the groups, or taken out, by hand.
        """
        self._local.begin()

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
            self._local.make_state()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_before_model(self, lambda: self.stage is not None and self.stage.lifecycle.is_joining())
        Join.notify_join_context(self)
        try:
            with self._refusals_told():
                self._check_arguments(arguments)
                self._local.step_arguments = arguments
                self._finish_step()
        finally:
            self._local.step_arguments = {}
        return loss

    def _refusals_told(self) -> AbstractContextManager[None]:
        return refusals_told([] if self.stage is None else [self.stage.lifecycle])

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
        self._without_hooks.step(
            self.optim, self._update_at_once, loss_scale, is_joining=self.is_joining, is_joined=is_joined
        )

    def _update_at_once(self, pairs: Sequence[tuple[Shard, Tensor]], veto: Veto) -> None:
        self.update(pairs, veto)
        self.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; between backward and :meth:`step` it discards the backward.

        A registered chain clears what it has applied by itself, so a loop need not call this.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        if self.stage is not None:
            with self._refusals_told():
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
        each rank. ``foreach`` chooses the latter's kernels, where all of ``.grad`` is the mean.

        Communication: one all-reduce of two numbers per parameter, and one of a number; none where all of ``.grad`` is
            the mean.

        Returns:
            The global norm before clipping, a 0-dimensional tensor, the same on every rank. With a :class:`ZeroStep`
            after a reducer it is that of ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)`` bit for bit;
            with one that reduces by itself the same up to the order of summation, and so without a stage, where it is
            summed in the groups' order (for the model's call ``torch.nn.utils.clip_grad_norm_`` itself).

        Raises:
            TrainingLoopError: the update was made in backward, or there is no mean to clip; or the norm is not finite
                and ``error_if_nonfinite``; or gradients were scaled differently on different ranks.
            UnsupportedError: under ``Join``.
        """
        clipping = Clipping(max_norm, norm_type, error_if_nonfinite, argument="max_norm")
        if self.stage is not None:
            return self.stage.clip_(clipping, foreach=foreach)
        gradients = [shard.parameter.grad for shard in self.shards.values() if shard.parameter.grad is not None]
        return clipping.clip_(gradients, foreach=foreach)

    def skip_update(self) -> AbstractContextManager[None]:
        """``with zero.skip_update():`` for backwards of a loss that is not this optimizer's.

        A backward that begins inside reduces, and makes no update: as with ``ZeroStep(zero, deferred=True)``,
        :meth:`step` then applies it and :meth:`zero_grad` discards it. Enter it on every rank alike. See
        :meth:`OverlappedOptimizer.skip_update`; under ``Join`` it needs that form.
        """
        return self.skipped.skipping()

    def wait(self) -> None:
        """Wait until every parameter holds its new value, if gathers run during the next forward.

        Looking a parameter up in the registered model waits for it, as ``module.weight``, ``parameters()``,
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
        return ZeroJoinHook(self.step_joined, self.wait)

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

        Call it on every rank.

        Communication: one gather of a few bytes per value, and gathers of at most about 64 MB of state each.

        Args:
            to: the rank of the group that gets the state; ``None`` for all ranks.

        Raises:
            ConfigurationError: the group has no rank ``to``.
            TrainingLoopError: inside of a ``Join``, when a rank has run out of inputs.
            UnsupportedError: the optimizer's state cannot be put together from the ranks' parts.
        """
        refuse_once_joined(self.process_group, "zero.consolidate_state_dict()")
        with Agreement(self.process_group, "consolidate the state of a ZeroRedundancyOptimizer") as agreement:
            state = self._settled_state()
            agreement.agree()
            self._consolidated.keep(state.consolidate(to))

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of the plain ``optimizer_class``; empty on ranks to which it was not consolidated.

        Before the first update every rank has it. Inside of ``torch.distributed.checkpoint``, whose functions every
        rank calls, the state is consolidated on all ranks.

        Raises:
            TrainingLoopError: :meth:`consolidate_state_dict` was not called since the last update.
        """
        before_state_dict(self)
        if is_in_loading() and not self.optim.state:
            self._local.make_state()
        if is_in_checkpointing():
            self.consolidate_state_dict(to=None)
        elif self._consolidated.is_untouched and not self.optim.state:
            self._consolidated.keep({"state": {}, **self._settled_state().part().entries})
        packed = self._consolidated.packed(self.param_groups)
        return after_state_dict(self, packed) if packed else packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a :meth:`state_dict` of this class or of the plain optimizer, on every rank.

        Raises:
            ConfigurationError: it belongs to other parameters.
        """
        given, was_untouched = before_load_state_dict(self, state_dict), self._consolidated.is_untouched
        self.prepare_to_load()
        self.wait()
        state = self.sharded_state()
        state.load(state.divided(given))
        if was_untouched and not given["state"]:
            # Accelerate loads what a new optimizer gave, which leaves it as it was.
            self._consolidated.reset()
        after_load_state_dict(self)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part, for ``torch.distributed.checkpoint.save``; any number of ranks can load it.

        ::

            dcp.save({"model": ddp.module.state_dict(), "optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)
            ...
            zero.load_sharded(folder, key="optimizer")
        """
        with Agreement(self.process_group, "save the parts of a ZeroRedundancyOptimizer") as agreement:
            state = self._settled_state()
            agreement.agree()
            return pieces_to_save(state)

    def load_sharded(self, checkpoint: str | os.PathLike[str] | StorageReader, *, key: str = "") -> None:
        """Load a saved :meth:`sharded_state_dict`, of any number of ranks. Call it on every rank.

        Args:
            checkpoint: the ``checkpoint_id`` (a folder), or a reader of it.
            key: its key in the saved dict.

        Raises:
            ConfigurationError: nothing is saved there, or it belongs to other parameters.
        """
        self.prepare_to_load()
        self.wait()
        load_pieces(self.sharded_state(), checkpoint, key)

    def prepare_to_load(self) -> None:
        """The state is about to be replaced.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        if self.stage is not None:
            self.stage.lifecycle.on_load()
        self._consolidated.note_change()

    def sharded_state(self) -> ShardedState:
        """This rank's part of the state."""
        shards = list(self.shards.values())
        return ShardedState(self.optim, self.param_groups, shards, self.partition, self.process_group)

    def _settled_state(self) -> ShardedState:
        """This rank's part of the state in the order of the parameters' memory, after all gathers have ended."""
        self.wait()
        self.follow_strides()
        return self.sharded_state()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("a ZeroRedundancyOptimizer belongs to its process group; save its state instead")

    def __repr__(self) -> str:
        return f"ZeroRedundancyOptimizer({self.optim!r}, rank {self.rank} of {self.world_size})"
