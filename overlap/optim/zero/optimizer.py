"""An optimizer whose state is shared out among the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from overlap._torch.c10d import backend_name
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.optim.grad_scaler import LossScale
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.subset import SubsetStepper, check_optimizer
from overlap.optim.zero.checkpoint import load_pieces, pieces_to_save
from overlap.optim.zero.exchange import Exchange, Workspace
from overlap.optim.zero.parameter_groups import check_class, copy_options, names_of, read_groups, with_names
from overlap.optim.zero.sharding import Ownership, Shard
from overlap.optim.zero.state import ShardedState, consolidate, load_plain
from overlap.optim.zero.without_hooks import UpdateWithoutHooks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["ShardedUpdate", "ZeroRedundancyOptimizer"]


class ShardedUpdate(Protocol):
    """What the optimizer asks of the stage that updates it in backward."""

    lifecycle: UpdateLifecycle

    def check_covers(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises: ConfigurationError: the stage's model does not train one of ``parameters``."""

    def forget_shards(self) -> None:
        """The shards have changed."""

    def step(self, loss_scale: LossScale) -> None:
        """Do what is left of the step after backward."""

    def step_replayed(self) -> None:
        """The same on a rank that has run out of inputs."""

    def wait(self) -> None:
        """Wait for gathers that are under way."""


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """``optimizer_class`` over parameters that every rank holds, with the state shared out: each rank keeps ``1/W``.

    The ZeRO optimizer, stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); with a :class:`ZeroStep`
    stage in DDP's backward also what the paper calls stage 2's communication: a bucket is reduce-scattered, each rank
    updates what it owns, and the new parameters are gathered, which moves what DDP's all-reduce alone does::

        ddp = DistributedDataParallel(model)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
        chain(ZeroStep(zero)).register(ddp)
        ...
        loss.backward(); zero.step(); scheduler.step()

    Without a stage, :meth:`step` expects averaged gradients on every rank, updates what this rank owns and gathers.
    ``param_groups`` hold the whole parameters and the hyperparameters, which are read at every update.

    Args:
        params: parameters or groups of them, the same on every rank.
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        process_group: the ranks that share; the default group where ``None``.
        parameters_as_bucket_view: taken for compatibility: chunks are views of the parameters anyway.
        overlap_with_ddp: declares that a stage will do the update in backward; :meth:`step` then insists on it.
        partition: ``"element"`` cuts every parameter into equal chunks, for optimizers that treat elements alike, as
            most do; ``"parameter"`` gives whole parameters to ranks, balanced by size, for the others.
        master_dtype: keep what is updated in this dtype, where it is wider than the parameter's: ``torch.float32`` for
            ``bfloat16`` parameters. Adds ``1/W`` of the parameters in that dtype on each rank.
        **defaults: arguments of ``optimizer_class``.

    Issues: at construction one gather of a few bytes a parameter on ``process_group``, to compare ranks.

    Raises:
        ConfigurationError: an argument is wrong, or ranks have different parameters.
        UnsupportedError: the optimizer or a parameter's memory layout does not fit.
    """

    # GradScaler then leaves the gradients as they are, always calls step, and says here whether they are finite.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: str = "element",
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
        cls = check_class(optimizer_class)
        self.process_group: dist.ProcessGroup = process_group or dist.group.WORLD  # type: ignore[assignment]
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.overlap_with_ddp = overlap_with_ddp
        self.partition = partition
        self._ownership = Ownership(self.process_group, cls, partition, master_dtype)
        self.stage: ShardedUpdate | None = None
        self._consolidated: dict[str, Any] | None = None
        groups = read_groups(params)
        chunks = self._ownership.add(groups, first_group=0)
        try:
            self.optim = check_optimizer(cls(chunks, **defaults))
            """The optimizer of ``optimizer_class`` that holds this rank's chunks."""
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{cls.__name__}: {error}") from error
        self._stepper = SubsetStepper(self.optim)
        sends_directly = backend_name(self.process_group, torch.device("cpu")) == "gloo"
        self.exchange = Exchange(sends_directly and self._ownership.device.type == "cpu", Workspace())
        self._without_hooks = UpdateWithoutHooks(self._ownership, self.exchange)
        self._is_complete = False
        Joinable.__init__(self)
        Optimizer.__init__(self, [with_names(group) for group in groups], self.optim.defaults)
        for ours, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            copy_options(inner, ours)
        self._is_complete = True

    @property  # type: ignore[override]
    def state(self) -> dict[Tensor, Any]:
        """This rank's part of the state, by whole parameter."""
        inner = self.optim.state
        return {s.parameter: inner[s.own] for s in self.shards.values() if s.own is not None and s.own in inner}

    @state.setter
    def state(self, state: Any) -> None:
        """Kept by the inner optimizer; Optimizer.__init__ wants to set it."""

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        return self._ownership.shards

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; of a registered model they are updated from the next backward on.

        Raises:
            ConfigurationError: as at construction.
        """
        if not self._is_complete:
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, Mapping):
            raise ConfigurationError(f"param_group is a dict, got {type(param_group).__name__}")
        (group,) = groups = read_groups([param_group])
        if self.stage is not None:
            self.stage.check_covers(group["params"], names_of(groups, first_group=len(self.param_groups)))
        (chunks,) = self._ownership.add(groups, first_group=len(self.param_groups))
        self.optim.add_param_group(chunks)
        super().add_param_group(with_names(group))
        copy_options(self.optim.param_groups[-1], self.param_groups[-1])
        if self.stage is not None:
            self.stage.forget_shards()

    def begin(self) -> None:
        """A new step begins: what moved or was changed since the last one is followed."""
        self._stepper.begin()
        for shard in self.shards.values():
            shard.refresh()

    @torch.no_grad()
    def update(self, pairs: Sequence[tuple[Shard, Tensor]]) -> None:
        """Step what this rank owns of each shard with the flat gradient of it; the parameters follow."""
        shards = [shard for shard, _ in pairs]
        chunks = [shard.own for shard in shards if shard.own is not None]
        shaped = [shard.shaped(gradient) for shard, gradient in pairs]
        matching = [g if g.dtype == own.dtype else g.to(own.dtype) for g, own in zip(shaped, chunks, strict=True)]
        for ours, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            copy_options(ours, inner)
        self._stepper.step(chunks, matching)
        for ours, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            copy_options(inner, ours)
        for shard in shards:
            shard.publish()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the step: what a stage has not updated in backward is updated now, and its parameters gathered.

        With a stage whose updates are interleaved that is nothing, and the call returns at once.

        Args:
            closure: evaluates the model and runs backward, as for any optimizer; its result is returned.

        Issues, on ``process_group``: nothing interleaved; deferred one gather a bucket, and one all-reduce of a number
        where gradients are clipped; without a stage, gathers of all trainable parameters.

        Raises:
            RegistrationError: ``overlap_with_ddp=True``, and no stage is registered.
            TrainingLoopError: a gradient has not been reduced, or ``GradScaler`` is used with interleaved updates.
        """
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        loss_scale = LossScale.given_to(self)
        if self.stage is not None:
            self.stage.step(loss_scale)
        elif self.overlap_with_ddp:
            raise RegistrationError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True, but no stage updates it: "
                "chain(ZeroStep(zero)).register(ddp), or leave overlap_with_ddp out"
            )
        else:
            self._step_without_hooks(loss_scale)
        return loss

    @torch.no_grad()
    def _step_without_hooks(self, loss_scale: LossScale, *, is_joined: bool = False) -> None:
        self.begin()
        self._without_hooks.step(self.update, loss_scale, is_joining=self.is_joining, is_joined=is_joined)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's; between backward and :meth:`step` it discards the backward.

        A registered chain clears what it has applied by itself, so a loop need not call this.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        if self.stage is not None:
            self.stage.lifecycle.on_zero_grad()
        super().zero_grad(set_to_none)

    def wait(self) -> None:
        """Wait until every parameter holds its new value, where gathers ride into the next forward.

        Only forwards of the registered model's modules, its ``state_dict()`` and the next :meth:`step` wait by
        themselves; call this before reading parameters in any other way.
        """
        if self.stage is not None:
            self.stage.wait()

    @property
    def is_joining(self) -> bool:
        """Whether this runs under ``with Join([ddp, zero])``."""
        return bool(self._join_config.enable)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Keeps this rank's chunks going when it has run out of inputs; for ``with Join([ddp, zero])``."""
        return _JoinHook(self.step_joined)

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        return self._ownership.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that share."""
        return self.process_group

    def step_joined(self) -> None:
        """Issue the collectives of one :meth:`step` on a rank that has run out of inputs."""
        if self.stage is not None:
            self.stage.step_replayed()
        else:
            self._step_without_hooks(LossScale(), is_joined=True)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to rank ``to`` (counted in the group), in CPU memory; :meth:`state_dict` then gives it.

        Every rank calls it. Issues: gathers of at most some 64 MB of state each.

        Raises:
            ConfigurationError: there is no rank ``to``.
        """
        self._consolidated = consolidate(self._settled_state(), to)

    def state_dict(self) -> dict[str, Any]:
        """What the plain ``optimizer_class`` over the same parameters would give, on the rank it was brought to.

        Raises:
            TrainingLoopError: :meth:`consolidate_state_dict` has not been called, or was for another rank.
        """
        if self._consolidated is None:
            raise TrainingLoopError(
                f"the state is shared out, and rank {self.rank} does not hold all of it: every rank calls "
                f"consolidate_state_dict(to={self.rank}) first, or save sharded_state_dict() instead"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of what :meth:`state_dict` or the plain optimizer gave; every rank is given all of it.

        Raises:
            ConfigurationError: it is of other parameters.
        """
        self._prepare_to_load()
        load_plain(self._settled_state(), state_dict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part, for ``torch.distributed.checkpoint.save``; reading it needs no equal number of ranks.

        ::

            dcp.save({"model": ddp.module.state_dict(), "optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)
            ...
            zero.load_sharded(folder, key="optimizer")
        """
        return pieces_to_save(self._settled_state())

    def load_sharded(self, checkpoint: str | os.PathLike[str] | StorageReader, *, key: str = "") -> None:
        """Load what :meth:`sharded_state_dict` gave, saved by any number of ranks; every rank calls it.

        Args:
            checkpoint: the ``checkpoint_id`` (a folder), or a reader of it.
            key: where in the saved dict it is.

        Raises:
            ConfigurationError: nothing is saved there, or it is of other parameters.
        """
        self._prepare_to_load()
        load_pieces(self._settled_state(), checkpoint, key)

    def _prepare_to_load(self) -> None:
        if self.stage is not None:
            self.stage.lifecycle.on_load()
        self._consolidated = None

    def _settled_state(self) -> ShardedState:
        """This rank's part of the state, when no gather is under way any longer."""
        self.wait()
        return ShardedState(self.optim, self.param_groups, self.shards, self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("a ZeroRedundancyOptimizer belongs to its process group; save its state instead")

    def __repr__(self) -> str:
        return f"ZeroRedundancyOptimizer({self.optim!r}, rank {self.rank} of {self.world_size})"


class _JoinHook(JoinHook):
    """Runs ``step`` for a rank that has run out of inputs. In backward nothing is needed: DDP's hook runs the stage."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def main_hook(self) -> None:
        """The collectives of one step, as the active ranks issue them."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Nothing: DDP brings the last joiner's parameters to all ranks."""
