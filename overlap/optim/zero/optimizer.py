"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from overlap._checks import check_flag, check_group, digest, is_one_of, short_repr, type_name
from overlap._torch import classes
from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all, sum_of_bits
from overlap._torch.optimizer import (
    has_post_hooks,
    hook_attributes,
    is_scheduled,
    own_step,
    run_state_hooks,
    step_hooks,
    unwrapped,
)
from overlap.errors import (
    ArgumentTypeError,
    ConfigurationError,
    OverlapError,
    RegistrationError,
    TrainingLoopError,
    UnsupportedError,
)
from overlap.hooks.collectives import all_reduce
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.engine.wavefront import run_between_passes, run_now
from overlap.hooks.stage import follow
from overlap.hooks.transforms.clip import Clipping, in_model_order
from overlap.hooks.wires import Wire
from overlap.join.context import active_join, refuse_once_joined
from overlap.optim.declared import check_one_eps, check_unit
from overlap.optim.gradients import and_others
from overlap.optim.lifecycle import Event, Phase
from overlap.optim.optimizer import LoopOptimizer, OptimizerProxy, warn_of_stages
from overlap.optim.stepper import FoundInf, SubsetStepper, check_optimizer
from overlap.optim.update import L, Update
from overlap.optim.zero import exchange
from overlap.optim.zero.checkpoint import ShardedState, packed
from overlap.optim.zero.exchange import BucketShards, Gather
from overlap.optim.zero.shards import Owners, Shard, copy_from_masters, copy_options, flatten
from overlap.optim.zero.state import StateView, check_divisible, tensors_in
from overlap.ranks.board import Agreement, group_all_reduce, group_broadcast, of_all_ranks

_INSTEAD = "chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True))"


class OwnPart:
    """What an optimizer steps of some parameters, while it has these shards.

    Args:
        shards: of the parameters, some of which this rank has no part of.
        gradients: the flat gradient of this rank's part of each.
    """

    def __init__(self, shards: Sequence[Shard], gradients: Sequence[Tensor]) -> None:
        each = zip(shards, gradients, strict=True)
        owned = [(shard, own, gradient) for shard, gradient in each if (own := shard.own) is not None]
        self.chunks = [own for _, own, _ in owned]
        self.gradients = [shard.shaped(gradient) if shard.is_whole else gradient for shard, _, gradient in owned]
        self.widens = [one.dtype for one in self.chunks] != [one.dtype for one in self.gradients]
        """Whether masters are of another dtype than gradients."""
        self.masters = [shard for shard, _, _ in owned if shard.has_master]
        self.divided = [(shard, own) for shard, own, _ in owned if not shard.is_whole]


class ShardedUpdate(Update[L]):
    """A :class:`~overlap.optim.zero.ZeroStep`, as far as its optimizer knows it."""

    has_whole_mean = False
    """Whether a reducer before the stage has left the mean in all of ``.grad``."""
    gather_wire: Wire | None = None
    """How new parameters are encoded, which each rank, the owner as well, then gets from a gather."""

    @abstractmethod
    def gather(self) -> None:
        """Outside of a backward: bring each rank's part to all ranks, in the next forward if that was asked for."""

    @abstractmethod
    def wait(self, *, raises: bool = True) -> None:
        """Wait for gathers that run during the next forward."""

    @abstractmethod
    def check_added(self, names: Mapping[Tensor, str]) -> None:
        """Raises: ConfigurationError: the model does not train parameters that are added to the optimizer."""


@classes.ZeroRedundancyOptimizer.register
class ZeroRedundancyOptimizer(LoopOptimizer):
    """``optimizer_class`` with its state divided among the ranks: each of ``W`` ranks keeps and updates ``1/W``. Save
    it by ``overlap.save(folder, ddp, zero)``: :meth:`state_dict` raises an error unless the state was consolidated.

    This is ZeRO stage 1 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). With a :class:`ZeroStep` in DDP's
    backward it communicates as stage 2 does. Without a stage, :meth:`step` expects averaged gradients on every rank,
    updates this rank's part and gathers the rest. ``param_groups`` hold the whole parameters, and the hyperparameters,
    which are read at every update.

    Args:
        params: parameters or groups of them, the same on every rank.
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        process_group: the ranks that divide the state; the default group if ``None``.
        parameters_as_bucket_view: accepted for compatibility; chunks are always views of the parameters.
        overlap_with_ddp: a stage makes the update in backward; :meth:`step` raises an error if none is registered.
        partition: ``"element"`` cuts every parameter into equal chunks; ``"parameter"`` gives whole parameters to
            ranks, balanced by size. ``None`` takes the unit in which ``optimizer_class`` is known, or was declared, to
            update.
        master_dtype: update a copy of each chunk in this dtype, if it is the parameter's or wider, such as
            ``torch.float32`` for ``bfloat16`` parameters.
        **defaults: arguments of ``optimizer_class``.

    Communication: at construction one agreement, in which ranks are compared.

    Raises:
        ConfigurationError: an argument is wrong, or the ranks have different parameters.
        PeerError: another rank raised one of these before they were compared.
        UnsupportedError: the optimizer is neither known nor declared (see :func:`overlap.declare`), or does not update
            elements by themselves where ``partition`` cuts parameters; or a parameter has gaps in memory.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    >>> chain(ZeroStep(zero)).register(ddp)
    <chain(ZeroStep(AdamW, interleaved)) registered>
    >>> for x, y in loader:
    ...     loss_fn(ddp(x), y).backward()
    ...     zero.step()
    >>> built = torch.optim.AdamW([{"params": list(ddp.parameters()), "weight_decay": 0.1}], lr=1e-3)
    >>> ZeroRedundancyOptimizer.from_optimizer(built).param_groups[0]["weight_decay"]
    0.1
    """

    updates: list[ShardedUpdate[Any]]  # type: ignore[assignment]
    """The registered stage: at most one."""
    version: object = None
    """Another object when parameters are added."""
    _is_complete = False
    """Whether the constructor has returned; ``Optimizer.__init__`` calls ``add_param_group`` and sets ``state``."""

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
        self.process_group = _checked_group(process_group)
        self._master_dtype = master_dtype
        # Makes an optimizer of groups; from_optimizer() has set its own.
        self._make: Callable[[list[dict[str, Any]]], Optimizer]
        if not hasattr(self, "_make"):
            self._make = partial(_made, optimizer_class, defaults)
        with Agreement(self.process_group, "make a ZeroRedundancyOptimizer") as agreement:
            check_flag("parameters_as_bucket_view", parameters_as_bucket_view)
            if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
                raise ConfigurationError(
                    "optimizer_class is a subclass of torch.optim.Optimizer such as torch.optim.AdamW, with its "
                    f"arguments as keywords, got {type_name(optimizer_class)}; an optimizer that exists is sharded by "
                    "ZeroRedundancyOptimizer.from_optimizer(optimizer)"
                )
            check_flag("overlap_with_ddp", overlap_with_ddp)
            if partition is not None and not is_one_of(partition, "element", "parameter"):
                raise ConfigurationError(f"partition is 'element' or 'parameter', got {short_repr(partition)}")
            if not (master_dtype is None or (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point)):
                raise ConfigurationError(
                    f"master_dtype is a floating-point dtype such as torch.float32, got {short_repr(master_dtype)}"
                )
            self.updates, self.blocks = [], []
            Joinable.__init__(self)
            try:
                Optimizer.__init__(self, params, {})
            except (KeyError, TypeError, ValueError) as error:
                kind = ArgumentTypeError if isinstance(error, TypeError) else ConfigurationError
                raise kind(
                    f"params is ddp.parameters(), which can be read only once, or groups of them: {error}"
                ) from error
            self._check_options(self.param_groups)
            unit = check_unit(optimizer_class, instead=_INSTEAD)
            if callable(getattr(optimizer_class, "eval", None)):  # A loop that asks with hasattr would not call it.
                raise UnsupportedError(
                    f"{optimizer_class.__name__} is switched by its methods train() and eval(), which a rank can only "
                    f"do for its own part: use {_INSTEAD}"
                )
            if partition == "element" and unit == "parameter":
                raise UnsupportedError(
                    f"{optimizer_class.__name__} does not update each element by itself: use partition='parameter', or "
                    "leave partition out"
                )
            self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
            self.partition = partition or unit
            self._owners = Owners(self.world_size)
            self.shards: dict[int, Shard] = {}
            """The shard of each parameter in the groups, by ``id`` of the parameter, in the groups' order."""
            self._shard(self.param_groups, agreement)
            self.optim = self._make(self._chunks_of(self.param_groups))
            """The optimizer of ``optimizer_class`` that holds this rank's chunks."""
        self.overlap_with_ddp = overlap_with_ddp
        self._stepper = SubsetStepper(self.optim)
        self.has_joined = False
        """Whether this rank issues the collectives of a step after its last input, under a ``Join``."""
        # By ``id`` of a shard, how many values its state had when they were checked.
        self._checked_state: dict[int, int] = {}
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        self._layout = _layout_of(self.param_groups)
        # The consolidated state, {} if another rank has it; no entry if it changed since. As `updates`, never replaced.
        self.consolidated: list[dict[str, Any]] = [] if self.optim.state else [self.sharded_state().without_values()]
        self._is_complete = True

    def _check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make an optimizer of one element of each parameter, before ranks meet, so that a wrong argument is raised."""

        def one_element(p: Tensor) -> Tensor:
            shape, dtype = (1,) * p.dim(), self.master_dtype_of(p) or p.dtype
            return torch.zeros(shape, dtype=dtype, device=p.device, requires_grad=p.requires_grad)

        tried = self._make([{**group, "params": list(map(one_element, group["params"]))} for group in groups])
        check_optimizer(tried)
        _check_own_step(tried)
        check_one_eps(tried, instead=_INSTEAD)

    def master_dtype_of(self, parameter: Tensor) -> torch.dtype | None:
        """That of its master; ``None`` if it has none."""
        own, given = parameter.dtype, self._master_dtype
        is_kept = given is not None and own.is_floating_point and (given == own or given.itemsize > own.itemsize)
        return given if is_kept else None

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

        The new one has its class, groups, defaults, attributes and state, and goes on bit for bit. Drop the old one
        afterwards, which still holds the whole state.

        Args:
            optimizer: of a known or declared class, the same on every rank. Wrappers of Accelerate and Lightning are
                unwrapped.
            process_group, overlap_with_ddp, partition, master_dtype: as of :class:`ZeroRedundancyOptimizer`.

        Communication: as at construction.

        Raises:
            ConfigurationError: as at construction; or ``optimizer`` is not a plain optimizer.
            UnsupportedError: as at construction; or it has hooks, a scheduler, a ``step()`` of its own or tensors in
                attributes, which would be lost.
        """
        group = _checked_group(process_group)
        with Agreement(group, "convert an optimizer to a ZeroRedundancyOptimizer") as agreement:
            plain = check_convertible(optimizer)
            agreement.agree()
        zero = cls.__new__(cls)
        zero._make = partial(_twin, _twin(plain, []))  # And not of plain, whose whole state would live on.
        cls.__init__(
            zero,
            plain.param_groups,
            type(plain),
            group,
            overlap_with_ddp=overlap_with_ddp,
            partition=partition,
            master_dtype=master_dtype,
        )
        if plain.state:
            zero.prepare_to_load()
            zero.sharded_state().load_whole(plain.state_dict())
        return zero

    @property
    def state(self) -> Any:
        """This rank's part of the state; the keys are the whole parameters. See :class:`StateView`."""
        return StateView(self.optim.state, self.shards, self.consolidated.clear, self.prepare_to_load)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        if self._is_complete:
            view, given = self.state, dict(state)
            view.clear()
            view.update(given)

    @property
    def _stage(self) -> ShardedUpdate[Any] | None:
        return self.updates[0] if self.updates else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; a registered stage updates them from the next backward on.

        Raises:
            ConfigurationError: as at construction.
        """
        if not self._is_complete:
            super().add_param_group({**param_group})  # PyTorch completes the dict that it is given.
            return
        with Agreement(self.process_group, "add a group of parameters to a ZeroRedundancyOptimizer") as agreement:
            self._check_groups()
            super().add_param_group({**param_group})
            added = self.param_groups[-1]
            try:
                self._check_options([added])
                self._shard([added], agreement)
            except BaseException:
                self.param_groups.pop()
                raise
        (chunks,) = self._chunks_of([added])
        self.optim.add_param_group(chunks)
        copy_options(self.optim.param_groups[-1:], [added])
        self._layout = _layout_of(self.param_groups)
        if self.optim.state:
            self.consolidated.clear()

    def _shard(self, groups: Sequence[Mapping[str, Any]], agreement: Agreement) -> None:
        """Make the shards of ``groups``, the last ones, when ranks agree that theirs are the same.

        Raises:
            ConfigurationError: a parameter is there twice, or the ranks have different ones, or there are two devices.
            UnsupportedError: a parameter cannot be cut.
        """
        added: dict[Tensor, tuple[int, str]] = {}
        for place, group in enumerate(groups, len(self.param_groups) - len(groups)):
            for position, p in enumerate(group["params"]):
                names = group.get("param_names")
                name = names[position] if names else f"parameter {position} of group {place}"
                if p in added:
                    raise ConfigurationError(f"{name} is the same as {added[p][1]}; pass each parameter once")
                added[p] = place, name
        devices = {str(p.device) for p in (*self.trained, *added)}
        if len(devices) != 1:
            raise ConfigurationError(f"ZeRO needs parameters, all on one device, and these are on {sorted(devices)}")
        for stage in self.updates:
            stage.check_added({p: name for p, (_, name) in added.items()})
        mine = [f"partition={self.partition!r}, master_dtype={self._master_dtype}"]
        for p, (place, name) in added.items():
            frozen = "" if p.requires_grad else ", frozen"
            mine.append(f"{name} (group {place}) is {tuple(p.shape)} {p.dtype} of strides {p.stride()}{frozen}")
        if not agreement.agree(digest(mine), lambda digests: len(set(digests)) == 1):
            everyone = of_all_ranks(mine, self.process_group)
            for rank, theirs in enumerate(everyone):
                for other, first in zip_longest(theirs, everyone[0], fillvalue="no further parameter"):
                    if other != first:
                        raise ConfigurationError(
                            f"ranks have different parameters or options: {other} on rank {rank}, {first} on rank 0"
                        )
        owners = self._owners.assign(list(added)) if self.partition == "parameter" else {}
        for p, (_, name) in added.items():
            self.shards[id(p)] = Shard(
                p,
                name=name,
                master_dtype=self.master_dtype_of(p),
                rank=self.rank,
                ranks=self.world_size,
                owner=owners.get(id(p)),
            )
        self.version = object()

    def _chunks_of(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``groups`` with this rank's chunks in place of the parameters."""
        chunks: list[dict[str, Any]] = []
        for group in groups:
            owned = [shard for p in group["params"] if (shard := self.shards[id(p)]).own is not None]
            chunks.append({**group, "params": [shard.own for shard in owned]})
            if "param_names" in group:
                chunks[-1]["param_names"] = [shard.name for shard in owned]
        return chunks

    def _check_groups(self) -> None:
        """Raises: ConfigurationError: the groups have other parameters than those that were added."""
        if self._layout != _layout_of(self.param_groups):
            raise ConfigurationError(
                "the parameters in zero.param_groups were changed by hand, but ranks have parts of those that were "
                "there: call zero.add_param_group({'params': [...]}), or make another ZeroRedundancyOptimizer"
            )

    # A step of this rank's part.

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: follow parameters that were moved or changed since the last one.

        Raises:
            ConfigurationError: parameters were put into the groups, or taken out, by hand.
        """
        self._check_groups()
        copy_options(self.param_groups, self.optim.param_groups)
        self._stepper.begin()
        for shard in self.shards.values():
            own, parameter = shard.own, shard.parameter
            if (
                shard.has_master
                or parameter.data_ptr() != shard.pointer
                or parameter.stride() != shard.strides
                or (own is not None and own.requires_grad != parameter.requires_grad)
            ):
                shard.refresh()

    def part(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> OwnPart:
        """This rank's part of ``parameters``, with its flat gradients."""
        return OwnPart([self.shards[id(parameter)] for parameter in parameters], gradients)

    def update(self, part: OwnPart, verdict: FoundInf, **arguments: Any) -> None:
        """Step ``part``, and write the parameters; where ``verdict`` is left to the device, it changes nothing there.
        Called under ``no_grad``.

        Raises:
            UnsupportedError: by element, new state belongs neither to elements nor to the parameter.
        """
        self.consolidated.clear()
        gradients = part.gradients
        if part.widens:
            gradients = list(map(torch.empty_like, part.chunks))
            copy_all(gradients, part.gradients)
        with nullcontext() if verdict.found_inf is None else verdict.passed_to(self.optim):
            self._stepper.step(part.chunks, gradients, **arguments)
        state, sizes = self.optim.state, self._checked_state
        for shard, own in part.divided:
            if len(state.get(own, ())) != sizes.get(id(shard)):
                check_divisible(self.optim, shard, state.get(own, {}), own.shape)
                sizes[id(shard)] = len(state.get(own, ()))
        if part.masters and (self._stage is None or self._stage.gather_wire is None):
            copy_from_masters(part.masters)

    def finish(self, **arguments: Any) -> None:
        """End a step: the groups, as its parts have left them, are then the same on all ranks."""
        # Not all options: the loop may have changed others since the step began, for the next one.
        for place, values in self._stepper.finish(**arguments).items():
            self.param_groups[place].update(values)

    # A step of the loop.

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """As :meth:`LoopOptimizer.step`; gathers the parameters that a stage has not gathered in backward.

        Communication: none if interleaved; if deferred one gather per bucket; without a stage gathers of all trainable
            parameters.

        Raises:
            RegistrationError: ``overlap_with_ddp=True``, and no stage is registered.
        """
        loss = super().step(closure, **arguments)
        if has_post_hooks(self):
            self.wait()  # They may read parameters.
        return loss

    def _check_call(self, arguments: Mapping[str, Any]) -> None:
        stage = self._stage
        if arguments and (self.is_joining or (stage is not None and stage.form.leads_to is not Phase.REDUCED)):
            given = ", ".join(f"{key}=..." for key in arguments)
            why = "a rank that has run out of inputs does not have these arguments: call zero.step()"
            if not self.is_joining:
                why = "the update was made in backward, without these arguments: use ZeroStep(zero, deferred=True)"
            raise TrainingLoopError(f"zero.step({given}): {why}")
        if stage is not None and stage.leaves_update:
            stage.wait()
        elif stage is None and self.overlap_with_ddp:
            raise RegistrationError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True, but no stage updates it: "
                "call chain(ZeroStep(zero)).register(ddp), or leave out overlap_with_ddp"
            )

    def _update(self, pending: list[Tensor], scaler: FoundInf, verdict: FoundInf, arguments: dict[str, Any]) -> None:
        stage = self._stage
        if stage is not None and stage.lifecycle.phase is not Phase.REDUCED:
            return
        is_lent = stage is None and self.is_joining and active_join(self.process_group) is None
        if not is_lent and (stage is None or (stage.has_whole_mean and not has_streams(self.join_device))):
            self._check_alike([] if stage is not None and stage.lifecycle.is_replay else pending)
        if scaler.skips(self.optim):
            return
        with nullcontext() if stage is None else stage.lifecycle.gradients.opened():
            self.begin()  # Parameters may have been moved since backward.
            if is_lent:
                pending, gradients = _broadcast_gradients(self)
            elif stage is not None and stage.lifecycle.is_replay:
                held, stage.held = stage.held, {}  # DDP sets no .grad on a rank that replays.
                pending, gradients = list(held), list(held.values())
            else:
                if stage is not None:
                    pending = [p for p in pending if id(p) in stage.lifecycle.gradients.reduced]
                gradients = [self.shards[id(parameter)].gradient() for parameter in pending]
            with torch.no_grad():
                scaler.unscale_(gradients)
                self.update(self.part(pending, gradients), FoundInf.of_any([verdict, scaler]), **arguments)
            self.finish(**arguments)
        if stage is None:
            self._gather(pending)
            return
        # See [Note: versions of sharded parameters].
        torch.autograd.graph.increment_version(list(stage.lifecycle.gradients.reduced.values()))
        stage.gather()

    @torch.no_grad()
    def _check_alike(self, parameters: Sequence[Tensor]) -> None:
        """Before an update with all of ``.grad``; a rank without inputs has no ``parameters`` to compare.

        Communication: one all-reduce of 16 bytes a parameter, which the host waits for.

        Raises:
            TrainingLoopError: a gradient differs between ranks, and each rank would update its part with its own.
        """
        least = torch.iinfo(torch.int64).min
        unknown = torch.full((), least, device=self.join_device)
        given = set(map(id, parameters))
        shards = list(self.shards.values())
        sums = [sum_of_bits(shard.gradient(whole=True)) if id(shard.parameter) in given else None for shard in shards]
        both = [unknown if one is None else sign * one for sign in (1, -1) for one in sums]
        largest, stage = torch.stack(both), self._stage
        if stage is None:
            group_all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        else:  # On the model's connections, which a rank has closed whose backward failed.
            assert stage.context is not None and stage.context.background is not None, "it is attached"
            compared = all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
            run_between_passes(stage.context.background, compared)
        highest, lowest = largest.view(2, -1).tolist()
        names = {} if stage is None else stage.lifecycle.names
        each = zip(shards, highest, lowest, strict=True)
        differ = [names.get(s.parameter, s.name) for s, high, low in each if least < high != -low]
        if differ:
            raise TrainingLoopError(
                f"the gradient of {differ[0]}{and_others(differ)} differs between ranks, so it is not their mean, and "
                "each rank would update its part with its own: run the last forward and backward of a step outside of "
                "ddp.no_sync(), and by ddp(x), not model(x); anything that the loop adds to gradients must be the "
                "same on every rank. zero_grad() discards these gradients"
            )

    def _gather(self, parameters: Sequence[Tensor]) -> None:
        torch.autograd.graph.increment_version([shard.parameter for shard in self.shards.values()])
        # As after a backward, in buckets of all trainable parameters, and of others that had a gradient.
        stepped = set(map(id, parameters))
        by_dtype: defaultdict[torch.dtype, list[Shard]] = defaultdict(list)
        for shard in self.shards.values():
            if shard.parameter.requires_grad or id(shard.parameter) in stepped:
                by_dtype[shard.parameter.dtype].append(shard)
        buckets = [BucketShards(alike, [one.parameter.numel() for one in alike]) for alike in by_dtype.values()]
        parts = [part for bucket in buckets for part, _ in bucket.parts]
        gathers = [Gather(index=place, shards=part) for place, part in enumerate(parts)]
        executor = executor_for(self.process_group, self.join_device)
        run_now(gathers, lambda gather: follow(exchange.gathering(gather.shards, self.process_group)), executor)

    def _finish_backward(self, pending: list[Tensor]) -> None:
        self.finish()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the mean gradients to at most this global norm, as ``torch.nn.utils.clip_grad_norm_`` does; on every
        rank, between backward and :meth:`step`.

        Communication: one all-reduce of a number; none where all of ``.grad`` is the mean.

        Returns:
            The global norm before clipping, a 0-dimensional tensor, the same on every rank; that of
            ``torch.nn.utils.clip_grad_norm_`` bit for bit with a :class:`ZeroStep` after a reducer, else up to the
            order of summation.

        Raises:
            TrainingLoopError: the update was made in backward, or there is no mean to clip; or the norm is not finite
                and ``error_if_nonfinite``.
            UnsupportedError: under ``Join``.
        """
        clipping = Clipping(max_norm, norm_type, error_if_nonfinite)
        stage = self._stage
        if stage is None:
            return clipping.clip_([p.grad for p in self._pending() if p.grad is not None], foreach=foreach)
        if stage.form.leads_to is not Phase.REDUCED:
            raise TrainingLoopError(
                "zero.clip_grad_norm_() after backward, but the update had been made in backward: use "
                "ZeroStep(zero, deferred=True), or chain(ClipGradNorm(max_norm), ZeroStep(zero)) without the call"
            )
        if self.is_joining:
            raise UnsupportedError(
                "under Join a rank that has run out of inputs calls nothing: use chain(ClipGradNorm(max_norm), "
                "ZeroStep(zero)) instead of zero.clip_grad_norm_()"
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
            for p in reduced:  # So that a shard's gradient is a view of it.
                if p.grad is not None and p.grad.stride() != p.stride():
                    p.grad = torch.empty_like(p, dtype=p.grad.dtype).copy_(p.grad)
            owned = [shard for p in reduced if (shard := self.shards[id(p)]).own is not None]
            parts = [part for shard in owned if (part := shard.gradient()).numel()]
            partial = clipping.partial(parts, self.join_device)
            group_all_reduce(partial, op=clipping.op, group=self.process_group)
            total = clipping.total(partial, self.trained)
            clipping.scale_(parts, total)
            return total

    def wait(self) -> None:
        """Wait until every parameter holds its new value, if gathers run during the next forward: before you read one
        that you hold yourself, in a list or in ``param_groups``."""
        if self._stage is not None:
            self._stage.wait()

    @property
    def is_joining(self) -> bool:
        """Whether this runs under ``with Join([ddp, zero])``."""
        return bool(self._join_config.enable)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Goes on updating this rank's chunks after its last input; for ``with Join([ddp, zero])``."""
        self.has_joined = False
        return _ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The parameters' device."""
        return next(iter(self.shards.values())).parameter.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that divide the state."""
        return self.process_group

    @property
    def stepped(self) -> Optimizer:
        return self.optim

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of all ranks that want a gradient."""
        return [shard.parameter for shard in self.shards.values() if shard.parameter.requires_grad]

    # Saving and loading.

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the whole state in CPU memory, for :meth:`state_dict` to return until the state changes; call it on
        every rank.

        Args:
            to: the rank of the group that gets the state; ``None`` for all ranks.

        Communication: one agreement, and then its own state from each rank, a tensor at a time, over a Gloo group.

        Raises:
            ConfigurationError: the group has no rank ``to``.
            TrainingLoopError: inside of a ``Join``, when a rank has run out of inputs.
            UnsupportedError: the optimizer's state cannot be put together from the ranks' parts.
        """
        refuse_once_joined(self.process_group, "zero.consolidate_state_dict()")
        with Agreement(self.process_group, "consolidate the state of a ZeroRedundancyOptimizer") as agreement:
            whole = self.sharded_state().consolidate(to, agreement)
        # That of another rank takes nothing away from this one.
        if whole is not None or not self.consolidated:
            self.consolidated[:] = [whole or {}]

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of the plain ``optimizer_class``; empty on ranks to which it was not consolidated.

        Before the first update every rank has it, with an entry that makes ``torch.distributed.checkpoint.load`` fail
        rather than load no state.

        Raises:
            TrainingLoopError: :meth:`consolidate_state_dict` was not called since the last update.
        """
        warn_of_stages(self.updates)
        run_state_hooks(self, "state_dict_pre")
        self._check_groups()
        if not self.consolidated:
            raise TrainingLoopError(
                "the state is divided among the ranks, and was not consolidated since it last changed: save with "
                "overlap.save(folder, ddp, zero) on every rank; or, for one dict, call "
                f"consolidate_state_dict(to={self.rank}), or to=None for all ranks, on every rank right before "
                "state_dict()"
            )
        (whole,) = self.consolidated
        return run_state_hooks(self, "state_dict_post", packed(whole, self.param_groups)) if whole else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a :meth:`state_dict` of this class or of the plain optimizer, on every rank.

        Raises:
            ConfigurationError: it belongs to other parameters.
        """
        warn_of_stages(self.updates)
        given = run_state_hooks(self, "load_state_dict_pre", dict(state_dict))
        self.prepare_to_load()
        state = self.sharded_state()
        state.load_whole(given)
        if not given["state"] and not self.optim.state:
            # Accelerate loads the state of a new optimizer, which leaves it as it was.
            self.consolidated[:] = [state.without_values()]
        run_state_hooks(self, "load_state_dict_post")

    def prepare_to_load(self) -> None:
        """The state is about to be replaced.

        Raises:
            TrainingLoopError: between backward and :meth:`step`, where the update was made in backward.
        """
        for stage in self.updates:
            stage.lifecycle.check(Event.LOAD)
            stage.wait(raises=False)
        self._stepper.forget_state()
        self.consolidated.clear()

    def sharded_state(self) -> ShardedState:
        """This rank's part of the state. Raises: ConfigurationError: the groups have other parameters."""
        self._check_groups()
        return ShardedState(self.optim, self.param_groups, list(self.shards.values()), self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("a ZeroRedundancyOptimizer belongs to its process group; save its state instead")

    def __repr__(self) -> str:
        return f"ZeroRedundancyOptimizer({self.optim!r}, rank {self.rank} of {self.world_size})"


def _layout_of(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The parameters of each group, by ``id``."""
    return [list(map(id, group["params"])) for group in groups]


def _checked_group(process_group: object) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ConfigurationError("ZeroRedundancyOptimizer needs torch.distributed.init_process_group first")
    return check_group("process_group", process_group) or dist.group.WORLD  # type: ignore[return-value]


def _made(cls: type[Optimizer], defaults: Mapping[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """``cls(groups, **defaults)``. Raises: ConfigurationError: ``cls`` does not take the arguments."""
    try:
        return cls(groups, **defaults)
    except OverlapError:
        raise
    except Exception as error:
        message = f"{cls.__name__}: {error}"
        if next(iter(inspect.signature(cls).parameters), "") in ("optimizer", "base_optimizer"):
            message += f"; it wraps an optimizer, so write {cls.__name__}(zero), with ZeroStep(zero, deferred=True)"
        raise ConfigurationError(message) from error


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer as ``optimizer``, with its attributes, of other groups and without state."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer), state=defaultdict(dict), param_groups=[])
    for group in groups:
        twin.add_param_group({**group})
    return twin


def _check_own_step(optimizer: Optimizer) -> None:
    """Raises: UnsupportedError: ``step()`` was replaced on the object."""
    if own_step(optimizer) is not None:
        raise UnsupportedError(
            f"step() of this {type(optimizer).__name__} was replaced on the object, which a sharded update would not "
            f"call: convert it before, or use {_INSTEAD}"
        )


class _ZeroJoinHook(JoinHook):
    """On a rank that has run out of inputs, issues the collectives of ``step()``, none where the others only
    accumulate; DDP's own hook runs those of backward, and brings the last joiner's parameters to all ranks."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        zero = self._zero
        # PyTorch's Join calls this once a forward, whether or not the others have called step().
        before, after = step_hooks(zero) if active_join(zero.process_group) is not None else ((), ())
        for hook in before:
            hook(zero, (zero,), {})
        self._step()
        for hook in after:
            hook(zero, (zero,), {})

    def _step(self) -> None:
        zero, stage = self._zero, self._zero._stage
        zero.has_joined = True
        if stage is None:
            zero._update(zero._pending(), FoundInf(), FoundInf(), {})
        elif stage.lifecycle.phase is Phase.REDUCED and stage.lifecycle.is_replay:
            try:
                if not stage.lifecycle.verdict.skips(zero.optim):
                    zero._update([], FoundInf(), stage.lifecycle.verdict, {})
            except BaseException:
                stage.lifecycle.on_update_failure()
                raise
            lifecycle = stage.lifecycle
            lifecycle.on_step(lifecycle.gradients.reduced.values(), verdict=lifecycle.verdict)
        zero.wait()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._zero.has_joined = False
        self._zero.wait()


def _broadcast_gradients(zero: ZeroRedundancyOptimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters to step and this rank's parts of their averaged gradients, under PyTorch's ``Join``, which leaves
    no ``.grad`` on a rank that has run out of inputs: the first rank with inputs left broadcasts its own.

    Communication: one all-reduce of a number, one broadcast of one byte per parameter, and one broadcast per gradient.
    """
    group, device, rank = zero.process_group, zero.join_device, zero.rank
    lender = torch.tensor([zero.world_size if zero.has_joined else rank], device=device)
    group_all_reduce(lender, op=dist.ReduceOp.MIN, group=group)
    src = int(lender.item())
    shards = list(zero.shards.values())
    has_gradient = torch.tensor([s.parameter.grad is not None for s in shards], dtype=torch.uint8, device=device)
    group_broadcast(has_gradient, src=src, group=group)
    lent = [shard for shard, flag in zip(shards, has_gradient.tolist(), strict=True) if flag]
    parts: list[Tensor] = []
    for shard in lent:
        whole = torch.empty_like(shard.parameter)
        if rank == src and shard.parameter.grad is not None:
            whole.copy_(shard.parameter.grad)
        flat = flatten(whole)
        group_broadcast(flat, src=src, group=group)
        parts.append(flat[slice(*shard.range)])
    return [shard.parameter for shard in lent], parts


def check_convertible(optimizer: object) -> Optimizer:
    """``optimizer`` itself, or the one that Accelerate or Lightning have wrapped.

    Raises:
        ConfigurationError: it is not a plain optimizer.
        UnsupportedError: something is attached to it that would be lost.
    """
    plain = unwrapped(optimizer)
    if isinstance(plain, classes.ZeroRedundancyOptimizer):
        raise ConfigurationError("from_optimizer was given a ZeroRedundancyOptimizer, which is sharded already: use it")
    if isinstance(plain, OptimizerProxy) or not isinstance(plain, Optimizer):
        raise ConfigurationError(
            f"from_optimizer takes a plain optimizer such as torch.optim.AdamW(ddp.parameters()), got "
            f"{type_name(plain)}: pass the .optimizer that it wraps, after .remove() of its registration"
        )
    hooks = [hook for attribute in hook_attributes for hook in getattr(plain, attribute, {}).values()]
    if hooks or is_scheduled(plain):
        lost = f"the hook {getattr(hooks[0], '__qualname__', hooks[0])}" if hooks else "a learning rate scheduler"
        raise UnsupportedError(
            f"this {type(plain).__name__} has {lost}, which would be lost: convert first, and then register hooks with "
            "the new optimizer, zero.register_step_post_hook(...), and make schedulers of it"
        )
    _check_own_step(plain)
    for name, value in vars(plain).items():
        if name not in ("param_groups", "state", "defaults") and tensors_in(value):
            raise UnsupportedError(
                f"{type(plain).__name__}.{name} is {type_name(value)}, which would not be divided: build "
                f"ZeroRedundancyOptimizer(ddp.parameters(), {type(plain).__name__}, ...) with the old arguments, and "
                "load_state_dict() the old state"
            )
    return plain
