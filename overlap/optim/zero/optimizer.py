"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from overlap._checks import check_flag, check_group, is_one_of, told
from overlap._torch import classes
from overlap._torch.c10d import backend_name
from overlap._torch.checkpoint import is_in_checkpointing, is_in_loading
from overlap._torch.device import has_streams
from overlap._torch.optimizer import has_post_hooks, own_step
from overlap._torch.state_dict_hooks import (
    after_load_state_dict,
    after_state_dict,
    before_load_state_dict,
    before_state_dict,
)
from overlap.errors import ConfigurationError, OverlapError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks.engine.background import run_now
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.transforms.clip import Clipping, ShardedNorm, in_model_order
from overlap.join import Joinable
from overlap.join.board import Agreement
from overlap.join.group_collectives import all_reduce, broadcast
from overlap.join.participation import active_join, refuse_once_joined
from overlap.optim.declared import Unit, check_one_eps, check_unit
from overlap.optim.phases import Event, Phase
from overlap.optim.scaler import LossScale, Veto
from overlap.optim.subset import SubsetStepper, check_optimizer
from overlap.optim.update import LoopOptimizer
from overlap.optim.zero.checkpoint import load_pieces, pieces_to_save
from overlap.optim.zero.conversion import (
    check_convertible,
    check_same_optimizer,
    constructor_arguments,
    copy_attributes,
)
from overlap.optim.zero.exchange import Exchange, Gather, Workspace
from overlap.optim.zero.partition import (
    check_class,
    check_master_dtype,
    check_members,
    copy_options,
    is_narrower,
    names_of,
    orthogonalization_steps,
    read_groups,
    with_names,
)
from overlap.optim.zero.shards import BucketShards, Ownership, Shard, flatten, shards_of_bucket
from overlap.optim.zero.state import ConsolidatedState, ShardedState, StateView, check_new_state

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["ZeroRedundancyOptimizer"]

# Of the buckets in which parameters are gathered without a stage, as large as DDP's.
_BUCKET_BYTES = 25 * 2**20
_INSTEAD = "chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True))"

Pairs = Sequence[tuple[Shard, Tensor]]
"""Shards with this rank's parts of their gradients."""


@classes.ZeroRedundancyOptimizer.register
class ZeroRedundancyOptimizer(LoopOptimizer):
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
        """Steps what this rank owns; see :class:`LocalOptimizer`."""
        self.begin = local.begin
        """Begins a step."""
        self.finish = local.finish
        """Ends a step."""
        self.updates, self.blocks = [], []
        self.stage = None
        sends_directly = backend_name(self.process_group, torch.device("cpu")) == "gloo"
        self.exchange = Exchange(sends_directly and not has_streams(self.ownership.device), Workspace())
        self.has_joined = False
        """Whether this rank issues the collectives of a step after its last input, under a ``Join``."""
        self._buckets: list[BucketShards] = []
        self._bucketed: tuple[int, ...] = ()
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
    def stage(self) -> Any:
        """The ``ZeroStep`` that updates with this optimizer; ``None`` where none is registered. Not of that type: the
        stage's module imports this one."""
        return self.updates[0] if self.updates else None

    @stage.setter
    def stage(self, stage: Any) -> None:
        self.updates[:] = [] if stage is None else [stage]
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

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Finish the step: update what a stage has not updated in backward, and gather the parameters.

        With a stage whose updates are interleaved nothing is left to do, and the call returns at once.

        Args:
            closure: evaluates the model and runs backward, as for any optimizer; its result is returned.
            **arguments: of the ``step`` of ``optimizer_class``.

        Communication, on ``process_group``: none if interleaved; if deferred one gather per bucket, and one all-reduce
            of a number if gradients are clipped; without a stage, gathers of all trainable parameters, and under
            PyTorch's ``Join`` before them one all-reduce of a number, a broadcast of one byte per parameter, and one
            broadcast per gradient.

        Raises:
            RegistrationError: ``overlap_with_ddp=True``, and no stage is registered.
            TrainingLoopError: a gradient has not been reduced, or ``GradScaler`` or ``arguments`` are used with
                interleaved updates.
            UnsupportedError: a CUDA graph is being captured.
        """
        if is_in_checkpointing():
            self._local.make_state()
            return None
        loss = super().step(closure, **arguments)
        if has_post_hooks(self):
            self.wait()  # They may read parameters.
        return loss

    def _check_call(self, loss_scale: LossScale, arguments: Mapping[str, Any]) -> None:
        stage, given = self.stage, ", ".join(f"{key}=..." for key in arguments)
        if arguments and stage is not None and not stage.updates_in_step:
            raise TrainingLoopError(
                f"zero.step({given}): the update was made in backward, without these arguments; "
                "use ZeroStep(zero, deferred=True)"
            )
        if arguments and self.is_joining:
            raise TrainingLoopError(
                f"zero.step({given}): a rank that has run out of inputs does not have these arguments; call zero.step()"
            )
        if stage is not None and stage.leaves_update:
            stage.wait()
        elif stage is None and self.overlap_with_ddp:
            raise RegistrationError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True, but no stage updates it: "
                "call chain(ZeroStep(zero)).register(ddp), or leave out overlap_with_ddp"
            )

    def _is_due(self, phases: Sequence[Phase], pending: list[Tensor]) -> bool:
        return not phases or Phase.REDUCED in phases

    def _opened(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stage is None else self.stage.lifecycle.gradients.opened()

    def _gradients(self, pending: list[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        stage = self.stage
        if stage is None:
            self.follow_strides()
        self.begin()  # Parameters may have been moved since backward.
        if stage is None and self.is_joining and active_join(self.process_group) is None:
            return _lent_gradients(self)
        if stage is not None and stage.lifecycle.is_replay:
            held, stage.held = stage.held, {}  # DDP sets no .grad on a rank that replays.
            return list(held), list(held.values())
        if stage is not None:
            pending = [parameter for parameter in pending if id(parameter) in stage.lifecycle.gradients.reduced]
            if stage.clips_whole:
                return pending, [parameter.grad for parameter in pending if parameter.grad is not None]
        return pending, [self.shards[id(parameter)].gradient() for parameter in pending]

    def _clip_(self, clipping: Clipping, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Tensor:
        stage = self.stage
        assert stage is not None, "only a stage clips"
        if stage.clips_whole:
            by_parameter = dict(zip(parameters, gradients, strict=True))
            ordered = in_model_order(by_parameter, stage.lifecycle.names)
            return clipping.clip_([by_parameter[parameter] for parameter in ordered])
        return self._clip_parts_(clipping, gradients)

    def _clip_parts_(self, clipping: Clipping, gradients: list[Tensor]) -> Tensor:
        """Clip by the norm of all ranks' parts. Communication: one all-reduce of a number."""
        norm = ShardedNorm(clipping, gradients, self.ownership.trained, self.join_device)
        all_reduce(norm.partial, op=norm.op, group=self.process_group)
        return norm.clip_()

    @torch.no_grad()
    def _apply(
        self, parameters: Sequence[Tensor], gradients: list[Tensor], veto: Veto, arguments: dict[str, Any]
    ) -> None:
        if self.stage is not None:
            pairs = self.stage.parts(parameters, gradients)
        else:
            pairs = [(self.shards[id(p)], gradient) for p, gradient in zip(parameters, gradients, strict=True)]
        self._local.step_arguments = arguments
        try:
            self.update([(shard, gradient) for shard, gradient in pairs if shard.own is not None], veto)
            self.finish()
        finally:
            self._local.step_arguments = {}

    def _publish(self, parameters: Sequence[Tensor]) -> None:
        # See [Note: versions of sharded parameters].
        if self.stage is not None:
            torch.autograd.graph.increment_version(list(self.stage.lifecycle.gradients.reduced.values()))
            self.stage.gather()
            return
        torch.autograd.graph.increment_version([shard.parameter for shard in self.shards.values()])
        # As after a backward, in buckets of all trainable parameters, and of others that had a gradient.
        stepped = set(map(id, parameters))
        shards = [s for s in self.shards.values() if s.parameter.requires_grad or id(s.parameter) in stepped]
        if (bucketed := tuple(map(id, shards))) != self._bucketed:
            found = [shards_of_bucket(parameters, [self.ownership]) for parameters in _in_buckets(shards)]
            self._bucketed, self._buckets = bucketed, [bucket for bucket in found if bucket is not None]
        gathers = [Gather(index=place, shards=bucket) for place, bucket in enumerate(self._buckets)]
        executor = executor_for(self.process_group, self.ownership.device)
        run_now(gathers, lambda gather: self.exchange.gather(gather.shards, self.process_group), executor)

    def _finish_backward(self, pending: list[Tensor]) -> None:
        self.finish()

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
        stage = self.stage
        if stage is None:
            gradients = [shard.parameter.grad for shard in self.shards.values() if shard.parameter.grad is not None]
            return clipping.clip_(gradients, foreach=foreach)
        if not stage.updates_in_step:
            raise TrainingLoopError(
                "zero.clip_grad_norm_() after backward, but the update had been made in backward: use "
                "ZeroStep(zero, deferred=True), or ZeroStep(zero, clip_grad_norm=...) without the call"
            )
        if self.is_joining:
            raise UnsupportedError(
                "under Join a rank that has run out of inputs calls nothing: use ZeroStep(zero, clip_grad_norm=...) "
                "instead of zero.clip_grad_norm_()"
            )
        if stage.lifecycle.phase is not Phase.REDUCED:
            raise TrainingLoopError(
                "zero.clip_grad_norm_() clips the mean over ranks: call it between a synchronized backward and step()"
            )
        reduced = [parameter for parameter in stage.lifecycle.gradients.reduced.values() if parameter.grad is not None]
        with torch.no_grad(), stage.lifecycle.gradients.opened():
            if stage.has_whole_mean:
                ordered = in_model_order(reduced, stage.lifecycle.names)
                return clipping.clip_([p.grad for p in ordered if p.grad is not None], foreach=foreach)
            for p in reduced:
                if p.grad is not None and p.grad.stride() != p.stride():
                    p.grad = torch.empty_like(p, dtype=p.grad.dtype).copy_(p.grad)
            shards = [self.shards[id(parameter)] for parameter in reduced]
            return self._clip_parts_(clipping, [shard.gradient() for shard in shards if shard.own is not None])

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
        return _ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        return self.ownership.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that divide the state."""
        return self.process_group

    def step_joined(self) -> None:
        """Issue the collectives of one :meth:`step` on a rank that has run out of inputs; none where the others only
        accumulate."""
        stage = self.stage
        if stage is None:
            self.has_joined = True
            try:
                self._update(self._pending(), LossScale(), Veto(), {})
            finally:
                self.has_joined = False
        elif stage.lifecycle.phase is Phase.REDUCED and stage.lifecycle.is_replay:
            try:
                if not stage.lifecycle.veto.stops:
                    self._update([], LossScale(), stage.lifecycle.veto, {})
            except BaseException:
                stage.lifecycle.on_update_failure()
                raise
            stage.lifecycle.on_step(stage.lifecycle.gradients.reduced.values())
        self.wait()

    @property
    def stepped(self) -> Optimizer:
        return self.optim

    @property
    def scheduled(self) -> Optimizer:
        return self

    @property
    def version(self) -> object:
        return self.ownership.version

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


class LocalOptimizer:
    """An optimizer of the user's class that holds this rank's parts of the parameters, and steps them.

    Args:
        cls: its class.
        groups: of whole parameters.
        defaults: the arguments of ``cls``.
        process_group: the ranks that divide the parameters.
        partition: how, ``"element"`` or ``"parameter"``; ``None``: in the unit in which ``cls`` updates.
        master_dtype: of copies of narrower parameters.
        agreement: by which the ranks come to their first collective together.
        on_change: called before the state changes.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        process_group: dist.ProcessGroup,
        *,
        partition: str | None,
        master_dtype: torch.dtype | None,
        agreement: Agreement,
        on_change: Callable[[], None],
    ) -> None:
        self._cls, self._defaults, self._master_dtype = cls, defaults, master_dtype
        orthogonalizes = self._tried(groups)
        self.partition = _partition(check_unit(cls, instead=_INSTEAD), cls, partition)
        self.ownership = Ownership(process_group, self.partition, master_dtype)
        agreement.agree()
        chunks = self.ownership.add(groups, first_group=0, orthogonalizes=orthogonalizes)
        self.optim = _made(cls, chunks, defaults)
        """The optimizer itself."""
        self._stepper = SubsetStepper(self.optim)
        self.param_groups: list[dict[str, Any]] = []
        """The groups of whole parameters, as the loop sees them; their hyperparameters count."""
        self._on_change = on_change
        self.step_arguments: Mapping[str, Any] = {}
        """Arguments of the optimizer's ``step``."""
        self.publishes = True
        """Whether :meth:`update` writes the parameters; a gather of differences does by itself."""
        self._state_sizes: dict[int, int] = {}

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        return self.ownership.shards

    def check_addition(self, group: dict[str, Any]) -> None:
        """Raises: ConfigurationError: the optimizer does not take this group."""
        self._tried([group])

    def add(self, group: dict[str, Any]) -> None:
        """Add this rank's parts of the parameters of a group, after the others; call it on every rank."""
        orthogonalizes = self._tried([group])
        (chunks,) = self.ownership.add([group], first_group=len(self.param_groups), orthogonalizes=orthogonalizes)
        self.optim.add_param_group(chunks)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: take note of parameters that were moved or changed since the last one.

        Raises:
            ConfigurationError: parameters were put into the groups, or taken out, by hand.
        """
        check_members(self.param_groups, self.shards)
        copy_options(self.param_groups, self.optim.param_groups)
        self._stepper.begin()
        for shard in self.ownership.shards.values():
            own, parameter = shard.own, shard.parameter
            if (
                shard.has_master
                or parameter.data_ptr() != shard.pointer
                or parameter.stride() != shard.strides
                or (own is not None and own.requires_grad != parameter.requires_grad)
            ):
                shard.refresh()

    @torch.no_grad()
    def update(self, pairs: Pairs, veto: Veto) -> None:
        """Step what this rank owns of each shard with its flat gradient, and write the parameters, unless a gather of
        differences is going to. Where ``veto`` is left to the device, it changes nothing there."""
        if veto.found_inf is None:
            self.step_owned(pairs)
        else:
            with veto.passed_to(self.optim):
                self.step_owned(pairs)
        for shard, _ in pairs if self.publishes else ():
            if shard.has_master:
                shard.publish()

    def step_owned(self, pairs: Pairs) -> None:
        """Step what this rank owns of each shard, where the optimizer has it, with its flat gradient."""
        self._on_change()
        chunks: list[Tensor] = []
        gradients: list[Tensor] = []
        for shard, gradient in pairs:
            if (own := shard.own) is not None:
                shaped = shard.shaped(gradient) if shard.is_whole else gradient
                chunks.append(own)
                gradients.append(shaped if shaped.dtype == own.dtype else shaped.to(own.dtype))
        self._stepper.step(chunks, gradients, **self.step_arguments)
        if self.partition != "element":
            return
        state, sizes = self.optim.state, self._state_sizes
        for shard, _ in pairs:
            if shard.own is not None and not shard.is_whole and len(state.get(shard.own, ())) != sizes.get(id(shard)):
                check_new_state(self.optim, [one for one, _ in pairs], sizes)
                return

    def finish(self) -> None:
        """End a step: the groups, as its parts have left them, are then the same on all ranks."""
        # Not all options: the loop may have changed others since the step began, for the next one.
        for place, values in self._stepper.finish(**self.step_arguments).items():
            self.param_groups[place].update(values)

    @torch.no_grad()
    def make_state(self) -> None:
        """Let the optimizer make the state of this rank's part by a step on zeros, which changes no parameter."""
        self.begin()
        owned = [shard for shard in self.shards.values() if shard.own is not None and shard.parameter.requires_grad]
        values = [shard.own.clone() for shard in owned if shard.own is not None]
        self.step_owned([(shard, flatten(torch.zeros_like(shard.own))) for shard in owned if shard.own is not None])
        for shard, value in zip(owned, values, strict=True):
            if shard.own is not None:
                shard.own.copy_(value)

    def _tried(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Make the optimizer of one element of each parameter, before ranks exchange anything; returns for each group
        in how many steps it orthogonalizes matrices.

        Raises:
            ConfigurationError: the class does not take the arguments.
            UnsupportedError: it needs a closure or sparse gradients, or has a ``step()`` of its own.
        """
        few = [{**group, "params": [self._one_element_of(p) for p in group["params"]]} for group in groups]
        tried = check_optimizer(_made(self._cls, few, self._defaults))
        if own_step(tried) is not None:
            raise UnsupportedError(
                f"{self._cls.__name__} replaces step() on its object, which a sharded update would not call; use "
                f"{_INSTEAD}"
            )
        check_one_eps(tried, instead=_INSTEAD)
        return [orthogonalization_steps(group) for group in tried.param_groups]

    def _one_element_of(self, parameter: Tensor) -> Tensor:
        dtype = self._master_dtype if is_narrower(parameter, self._master_dtype) else parameter.dtype
        return torch.zeros(
            (1,) * parameter.dim(), dtype=dtype, device=parameter.device, requires_grad=parameter.requires_grad
        )


def _made(cls: type[Optimizer], groups: Any, defaults: Mapping[str, Any]) -> Optimizer:
    """``cls(groups, **defaults)``.

    Raises:
        ConfigurationError: ``cls`` does not take the arguments.
    """
    try:
        return cls(groups, **defaults)
    except OverlapError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{cls.__name__}: {error}") from error


def _partition(unit: Unit, cls: type[Optimizer], partition: object) -> str:
    """How ``cls`` is divided, which updates in ``unit``.

    Raises:
        ConfigurationError: there is no such ``partition``.
        UnsupportedError: it is finer than ``unit``.
    """
    if partition is None:
        return unit
    if not is_one_of(partition, "element", "parameter"):
        raise ConfigurationError(f"partition is 'element' or 'parameter', got {told(partition)}")
    if partition == "element" and unit == "parameter":
        raise UnsupportedError(
            f"{cls.__name__} does not update each element by itself: use partition='parameter', or leave partition out"
        )
    return str(partition)


class _ZeroJoinHook(JoinHook):
    """On a rank that has run out of inputs, DDP's own hook runs what stages do in backward, and brings the last
    joiner's parameters to all ranks."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        """The collectives of one step, as the active ranks issue them."""
        self._zero.step_joined()

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the block parameters are final."""
        self._zero.wait()


def _lent_gradients(zero: ZeroRedundancyOptimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters to step and this rank's parts of their averaged gradients, under PyTorch's ``Join``, which leaves
    no ``.grad`` on a rank that has run out of inputs: the first rank with inputs left broadcasts its own.

    Communication: one all-reduce of a number, one broadcast of one byte per parameter, and one broadcast per gradient.
    """
    group, device, rank = zero.process_group, zero.join_device, zero.rank
    lender = torch.tensor([zero.world_size if zero.has_joined else rank], device=device)
    all_reduce(lender, op=dist.ReduceOp.MIN, group=group)
    src = int(lender.item())
    shards = list(zero.shards.values())
    has_gradient = torch.tensor([s.parameter.grad is not None for s in shards], dtype=torch.uint8, device=device)
    broadcast(has_gradient, src=src, group=group)
    lent = [shard for shard, flag in zip(shards, has_gradient.tolist(), strict=True) if flag]
    parts: list[Tensor] = []
    for shard in lent:
        whole = torch.empty_like(shard.parameter)
        if rank == src and shard.parameter.grad is not None:
            whole.copy_(shard.parameter.grad)
        flat = flatten(whole)
        broadcast(flat, src=src, group=group)
        parts.append(flat[slice(*shard.range)])
    return [shard.parameter for shard in lent], parts


def _in_buckets(shards: Sequence[Shard]) -> list[list[Tensor]]:
    """Parameters of one dtype, in their order, about 25 MB in each bucket."""
    open_ones: dict[torch.dtype, list[Tensor]] = {}
    full: list[list[Tensor]] = []
    for parameter in (shard.parameter for shard in shards):
        bucket = open_ones.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(member.nbytes for member in bucket) >= _BUCKET_BYTES:
            full.append(open_ones.pop(parameter.dtype))
    return [*full, *open_ones.values()]
