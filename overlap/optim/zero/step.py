"""The sharded update: each rank makes its part of it, and the parts are gathered. See [Note: an update].

[Note: one verdict]

``GradScaler`` looks at ``.grad`` on its own rank, and all ranks must reach the same verdict, or their scales drift
apart. But after a reduce-scatter only the owner of a chunk holds its mean. So the ranks vote, and each rank that learns
of a non-finite gradient elsewhere marks one element of a part that it does not own, where no update reads ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp, check_flag, is_one_of, short_repr, type_name
from overlap._torch.device import has_streams
from overlap._torch.foreach import LargestElements
from overlap._torch.optimizer import unwrapped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Chain, Role, Stage, StageContext, StageHook, all_reduce, chain, whole_pass
from overlap.hooks.adapters import as_stage
from overlap.hooks.collectives import Operation
from overlap.hooks.stage import Plan, UpdateStage
from overlap.hooks.wires import TopK, Wire
from overlap.join.context import active_join
from overlap.optim.lifecycle import Form, Phase
from overlap.optim.update import BucketLayout
from overlap.optim.zero import exchange
from overlap.optim.zero.exchange import BucketShards, Gather, in_elements, reduced, shards_of
from overlap.optim.zero.optimizer import ShardedUpdate, ZeroRedundancyOptimizer
from overlap.optim.zero.prefetch import ParameterPrefetch


class ReduceScatter(Stage):
    """Reduce-scatters a bucket: each rank gets the mean of its part of the parameters of ``zeros``.

    This is the first half of :class:`ZeroStep`, for chains in which other stages need the mean, too; a chain gets it
    by itself where it is needed. Sets ``bucket.owned``. After it ``bucket.buffer`` holds the mean where this rank owns
    it, elsewhere this rank's own gradient divided by ``W``; parameters that none of ``zeros`` has are averaged on all
    ranks.

    Args:
        zeros: the optimizers; a ``ZeroStep`` of each follows in the chain.

    Communication: per bucket of ``N`` elements one reduce-scatter, which sends ``N (W-1)/W``, and one all-reduce of the
        parameters that none of ``zeros`` has, if there are some.

    Raises:
        ConfigurationError: ``zeros`` are not different optimizers of one process group, or (at registration) the chain
            has no ``ZeroStep`` of one of them.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    >>> chain(ReduceScatter(zero), ClipGradNorm(1.0), ZeroStep(zero))
    chain(ReduceScatter(AdamW), ClipGradNorm(1), ZeroStep(AdamW, interleaved))
    """

    role = Role.REDUCER

    def __init__(self, *zeros: ZeroRedundancyOptimizer) -> None:
        self.zeros = tuple(unwrapped(zero) for zero in zeros)
        if len(set(map(id, self.zeros))) != max(1, len(self.zeros)):
            raise ConfigurationError(
                f"ReduceScatter takes the optimizers it reduces for, each once, got {len(self.zeros)}: "
                "ReduceScatter(zero)"
            )
        for zero in self.zeros:
            if not isinstance(zero, ZeroRedundancyOptimizer):
                raise ConfigurationError(
                    f"ReduceScatter takes overlap.ZeroRedundancyOptimizers, got {type_name(zero)}; to average on every "
                    "rank use AllReduce()"
                )
        # By the index of a bucket: its parameters, the versions of the optimizers', and its shards.
        self._found: dict[int, tuple[object, object, BucketShards | None]] = {}

    @property
    def as_code(self) -> str:
        return "ReduceScatter(zero)"

    @property
    def signature(self) -> str:
        return f"ReduceScatter({', '.join(f'{type(zero.optim).__name__} by {zero.partition}' for zero in self.zeros)})"

    def attach(self, context: StageContext) -> None:
        for zero in self.zeros:
            _check_same_group(context.group, zero.process_group)

    def check_together(self, stages: Sequence[Stage]) -> None:
        if not any(stage is self for stage in stages):
            raise ConfigurationError(
                f"{self!r} leaves each rank a part of the mean, which a stage around it cannot know: put it into the "
                "chain itself, chain(ReduceScatter(zero), ZeroStep(zero))"
            )
        for zero in self.zeros:
            if not any(stage in zero.updates for stage in stages):
                raise ConfigurationError(
                    f"{self!r} leaves each rank its part of the mean for {type(zero.optim).__name__}, but no ZeroStep "
                    "of it follows: chain(ReduceScatter(zero), ZeroStep(zero))"
                )

    def plan(self, bucket: Bucket) -> Plan:
        return exchange.reduction(in_elements(bucket), self._shards_of(bucket))

    def output_bucket(self, bucket: Bucket) -> Bucket:
        return reduced(bucket, self._shards_of(bucket))

    def _shards_of(self, bucket: Bucket) -> BucketShards | None:
        versions = [zero.version for zero in self.zeros]
        found = self._found.get(bucket.index)
        if found is None or found[0] is not bucket.parameters or found[1] != versions:
            shards = shards_of(bucket.parameters, *(zero.shards for zero in self.zeros))
            found = self._found[bucket.index] = bucket.parameters, versions, shards
        return found[2]

    def __repr__(self) -> str:
        return f"ReduceScatter({', '.join(type(zero.optim).__name__ for zero in self.zeros)})"


@dataclass(frozen=True, eq=False)
class ShardedLayout(BucketLayout):
    """As :class:`BucketLayout`, of a sharded update."""

    shards: BucketShards | None
    """Of the bucket; ``None`` if none of its parameters is sharded."""


class ZeroStep(ShardedUpdate[ShardedLayout]):
    """Each rank updates its part of a bucket's parameters and gathers the others' parts.

    If it is first in its chain, the stage reduce-scatters the bucket itself, and sends as much as DDP's all-reduce.
    After a reducer, each rank updates its part with the reducer's result. See ``docs/zero.md`` for the forms.

    Without a reducer before it, this rank has the mean only of the elements that it owns, so ``.grad`` can neither be
    read nor changed after backward: an attempt raises ``TrainingLoopError``. After a reducer ``.grad`` is the mean;
    read-only until ``step()`` where the update was made in backward. It is cleared before the model's next forward.

    Args:
        zero: the optimizer; the model must have all its trainable parameters. Other parameters of the model are
            averaged and keep their ``.grad``.
        deferred: update all buckets at once in ``zero.step()``, as ``GradScaler`` needs, not each one in backward as
            soon as it is reduced.
        gather: ``"backward"`` waits for new parameters before backward (or a deferred ``zero.step()``) returns;
            ``"forward"`` gathers them during the next forward. Looking a parameter up in the model waits for it;
            call ``zero.wait()`` before you read one that you hold yourself.
        gather_wire: gather parameters in fewer bytes, encoded by ``BFloat16()`` or ``Int8()``, from masters. They are
            the same on all ranks, but not those of plain DDP; the masters, from which updates go on, are never rounded.
        automatic: backward does everything, a deferred update with its last bucket; the loop calls no ``step()``.
        release_gradients: free a bucket's memory as soon as it is updated and gathered. ``.grad`` cannot be read after
            backward. Needs ``DistributedDataParallel(..., gradient_as_bucket_view=True)``; see ``docs/memory.md``.

    Communication: per bucket one reduce-scatter, if first; one all-gather; if DDP looks for unused parameters, one
        all-reduce of one byte per parameter. Deferred and first: one all-reduce of a number per backward, so that all
        ranks know of a gradient that is not finite.

    Raises:
        ConfigurationError: an argument is out of range, ``gather_wire`` lacks masters or is given with
            ``partition="parameter"``, or (at registration) the optimizer has parameters that the model does not have.
        TrainingLoopError: in ``backward``, if ``zero.step()`` was not called after the backward before.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    >>> chain(ZeroStep(zero)).register(ddp)
    <chain(ZeroStep(AdamW, interleaved)) registered>
    >>> loss_fn(ddp(x), y).backward()  # reduces, updates and gathers
    >>> zero.step()
    """

    optimizer: ZeroRedundancyOptimizer
    is_sharded = True

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        *,
        deferred: bool | None = None,
        gather: str = "backward",
        gather_wire: Wire | None = None,
        automatic: bool = False,
        release_gradients: bool = False,
    ) -> None:
        zero = unwrapped(zero)
        if not isinstance(zero, ZeroRedundancyOptimizer):
            raise ConfigurationError(
                f"ZeroStep takes an overlap.ZeroRedundancyOptimizer, got {type_name(zero)}; for an optimizer that "
                "every rank holds in full use chain(AllReduce(), Step(optimizer))"
            )
        if not is_one_of(gather, "backward", "forward"):
            raise ConfigurationError(f"gather is 'backward' or 'forward', got {short_repr(gather)}")
        check_flag("automatic", automatic)
        if gather_wire is not None:
            _check_wire(gather_wire, zero, {shard.parameter: shard.name for shard in zero.shards.values()})
        self.gather_wire = gather_wire
        super().__init__(
            zero,
            Form(
                "zero.step()",
                "ZeroStep(zero, deferred=True)",
                edits="chain(AllReduce(), ZeroStep(zero, deferred=True))",
                skip="stage.skip_update()" if automatic else "zero.skip_update()",
                is_automatic=automatic,
            ),
            deferred=deferred,
            release_gradients=release_gradients,
        )
        self._gathers_in_forward = gather == "forward"
        self._prefetch = ParameterPrefetch()
        # Whether step() of other sharded updates of the chain issues collectives, too, in the order of the calls.
        self._is_in_step_with_others = False
        self._follows_its_reducer = False
        # Of the last backward: its buckets in their order, and whether its gradients are finite on all ranks.
        self._gathers: list[Gather] = []
        self._largest = LargestElements()
        self._found_inf: Tensor | None = None

    # The primitives of an update.

    def owns_gradient_of(self, parameter: Tensor) -> bool:
        return id(parameter) in self.optimizer.shards

    def make_layout(self, bucket: Bucket) -> ShardedLayout:
        shards = shards_of(bucket.parameters, self.optimizer.shards)
        parameters = [] if shards is None else [shard.parameter for shard in shards]
        return ShardedLayout(bucket.parameters, parameters, {id(p): p for p in parameters}, shards)

    def reduction(self, bucket: Bucket, layout: ShardedLayout) -> Plan:
        shards = layout.shards
        # A reducer may leave gradients as they are in some passes, such as those of a warm-up.
        self.has_whole_mean = bucket.is_mean and not self._follows_its_reducer

        def arrive() -> None:  # First of all, so that gathers have the order of arrivals.
            if shards is not None:
                self._gathers.append(Gather(index=bucket.index, step=bucket.step, shards=shards))

        noted: Plan = (arrive,) if self._gathers_later else ()
        return noted if bucket.is_mean else (*noted, *exchange.reduction(in_elements(bucket), shards))

    @property
    def _gathers_later(self) -> bool:
        """Whether parameters are not gathered in the backward under way."""
        return self.leaves_update or self._gathers_in_forward

    def steps(self, bucket: Bucket, layout: ShardedLayout, used: list[bool] | None) -> Plan:
        steps = super().steps(bucket, layout, used)
        if (shards := layout.shards) is None or self.leaves_update:
            return steps
        gather = () if self._gathers_in_forward else self.gathering(shards, bucket.group)
        is_new = False

        def send() -> Operation | None:
            nonlocal is_new
            self.lifecycle.gradients.note_applied(layout.parameters)
            verdict = self.lifecycle.verdict
            is_new = verdict.found_inf is None or not verdict.skips(self.stepped)
            if is_new:  # See [Note: versions of sharded parameters].
                torch.autograd.graph.increment_version(layout.parameters)
            return gather[0]() if is_new and gather else None

        def receive() -> Operation | None:
            return gather[1]() if is_new else None

        return (*steps, send, receive) if len(gather) > 1 else (*steps, send)

    def to_update(
        self, bucket: Bucket, layout: ShardedLayout, used: list[bool] | None
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        if layout.shards is None:
            return [], []
        parameters, gradients = layout.shards.own_parameters, layout.shards.gradients(in_elements(bucket).buffer)
        if used is None:
            return parameters, gradients
        kept = {id(p) for p, is_used in zip(layout.parameters, used, strict=True) if is_used}
        pairs = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if id(p) in kept]
        return [parameter for parameter, _ in pairs], [gradient for _, gradient in pairs]

    def leaving(self, bucket: Bucket, layout: ShardedLayout, used: list[bool] | None) -> Plan:
        parameters, gradients = self.to_update(bucket, layout, used)

        def keep() -> None:  # DDP sets no .grad on a rank that replays, and its buffers are gone afterwards.
            self.held.update(zip(parameters, [gradient.clone() for gradient in gradients], strict=True))

        def look() -> Operation:  # See [Note: one verdict].
            self._largest.update(gradients)
            return whole_pass()

        def vote() -> Operation:
            self._found_inf = self._largest.found_inf(bucket.buffer.device)
            return all_reduce(self._found_inf, op=dist.ReduceOp.MAX, group=bucket.group)

        kept: Plan = (keep,) if bucket.is_replay else ()
        if self.has_whole_mean:
            return kept
        return (*kept, look, vote) if bucket.is_last else (*kept, look)

    def applying(self, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Callable[[], None]:
        part = self.optimizer.part(parameters, gradients)

        def apply() -> None:
            verdict = self.lifecycle.verdict
            if verdict.found_inf is None or not verdict.skips(self.stepped):
                self.optimizer.update(part, verdict)

        return apply

    def apply_held(self, held: dict[Tensor, Tensor]) -> None:
        self.optimizer.update(self.optimizer.part(list(held), list(held.values())), self.lifecycle.verdict)
        self.optimizer.finish()

    def before_forward(self) -> None:
        super().before_forward()
        context = self.context
        ddp = None if context is None or context.ddp is None else context.ddp()
        if context is None or ddp is None or ddp.require_backward_grad_sync or not has_streams(context.device):
            return
        # On a CPU step() compares the gradients of all ranks, for which the host of an accelerator would wait.
        if self.has_whole_mean and self.lifecycle.phase is Phase.REDUCED:
            raise TrainingLoopError(
                "a forward under ddp.no_sync() between a synchronized backward and zero.step(): its backward would add "
                "this rank's own gradients to the mean, and each rank would update its part with its own; run it after "
                "zero.step(), before the synchronized one, or under torch.no_grad() if no backward follows"
            )

    def check_backward(self, *, is_replay: bool) -> None:
        super().check_backward(is_replay=is_replay)
        self.wait()
        zero = self.optimizer
        if zero.blocks and self.form.leads_to is not Phase.REDUCED and self.lifecycle.is_joining():
            raise TrainingLoopError(
                "skip_update() under Join: ranks that have run out of inputs make the update in backward, and are not "
                "told that it is skipped; use ZeroStep(zero, deferred=True)"
            )
        if is_replay and not zero.is_joining and self.updates_after_backward:
            raise TrainingLoopError(f"{self!r} acts outside of backward, too: use `with Join([ddp, zero])`")
        if self._is_in_step_with_others and zero.is_joining and active_join(zero.process_group) is None:
            raise UnsupportedError(
                "PyTorch's Join does not tell a rank without inputs in which order the others call step() of several "
                "sharded optimizers: use `with overlap.Join([ddp, ...])`, or leave out deferred=True"
            )

    def begin(self) -> None:
        self._gathers.clear()
        self._largest.clear()
        self._found_inf = None
        self.optimizer.begin()

    def conclude(self) -> None:
        self.lifecycle.gradients.has_parts = not self.has_whole_mean
        if self.leaves_update:
            self._mark_verdict()
        elif self._gathers_in_forward and not self.lifecycle.verdict.skips(self.stepped):
            join = active_join(self.optimizer.process_group)
            if join is not None and self.lifecycle.is_replay:
                join.after_replay.append(self.gather)  # Other ranks finish DDP's backward first.
            else:
                self.gather()

    @torch.no_grad()
    def _mark_verdict(self) -> None:
        """Mark ``.grad`` if a gradient is not finite on any rank; on an accelerator the host does not wait."""
        found_inf = self._found_inf
        if found_inf is None or not (has_streams(found_inf.device) or found_inf.item()):
            return
        for shard in self.optimizer.shards.values():
            grad, (start, end) = shard.parameter.grad, shard.range
            other = 0 if start > 0 else end
            if grad is not None and other < grad.numel() and grad.stride() == shard.parameter.stride():
                element = grad.as_strided((1,), (1,), int(grad.storage_offset()) + other)
                element.copy_(torch.where(found_inf > 0, float("inf"), element))
                return

    def end_step(self) -> None:
        self.optimizer.finish()

    def gathering(self, shards: BucketShards, group: dist.ProcessGroup) -> Plan:
        """The functions that bring the new parameters of ``shards`` to all ranks, none or two."""
        if self.gather_wire is not None:
            return exchange.gathering_through(self.gather_wire, shards, group)
        return exchange.gathering(shards, group)

    # Gathers that do not run bucket by bucket in backward.

    def gather(self) -> None:
        assert self.context is not None, "gathers run while the stage is attached"
        gathers = self._gathers[::-1]  # The last bucket has the first layers, which the next forward needs first.
        if self._gathers_in_forward:
            gathers = [replace(gather, shards=part) for gather in gathers for part, _ in gather.shards.parts]
        prefetch = self._prefetch if self._gathers_in_forward else ParameterPrefetch()
        # They may still run while the stage is detached.
        prefetch.begin(self.context, gathers, partial(self.gathering, group=self.context.group))
        # When all have joined DDP brings parameters to all. A replay must not wait inside of DDP's shadow: its hook
        # does.
        if not self._gathers_in_forward or (self.optimizer.is_joining and not self.lifecycle.is_replay):
            prefetch.wait()

    def wait(self, *, raises: bool = True) -> None:
        (self._prefetch.wait if raises else self._prefetch.wait_quietly)()

    @property
    def updates_after_backward(self) -> bool:
        return super().updates_after_backward or self._gathers_in_forward

    # Registration.

    @property
    def signature(self) -> str:
        return f"{self!r} by {self.optimizer.partition}"

    @property
    def reduces(self) -> bool:
        return True

    def reducer_for(self, updates: Sequence[UpdateStage]) -> ReduceScatter:
        return ReduceScatter(*(update.optimizer for update in updates if isinstance(update, ZeroStep)))

    def output_bucket(self, bucket: Bucket) -> Bucket:
        return bucket if bucket.is_mean else reduced(bucket, self.layout_of(bucket).shards)

    @property
    def updated(self) -> Sequence[Tensor]:
        return [shard.parameter for shard in self.optimizer.shards.values()]

    def check_together(self, stages: Sequence[Stage]) -> None:
        super().check_together(stages)
        reducers = [stage for stage in self.before if stage.role is Role.REDUCER]
        has_own = any(isinstance(stage, ReduceScatter) and self.optimizer in stage.zeros for stage in reducers)
        self._follows_its_reducer = has_own
        self.has_whole_mean = bool(reducers) and not has_own
        in_step = [stage for stage in stages if isinstance(stage, ZeroStep) and stage.form.leads_to is Phase.REDUCED]
        self._is_in_step_with_others = self in in_step and len(in_step) > 1

    def attach(self, context: StageContext) -> None:
        zero = self.optimizer
        if any(other is not self for other in zero.updates):
            raise RegistrationError("this ZeroRedundancyOptimizer is registered already; .remove() that registration")
        _check_same_group(context.group, zero.process_group)
        names = {shard.parameter: shard.name for shard in zero.shards.values()}
        if context.names is not None:
            check_covered(names, context.names)
        super().attach(context)
        if context.names is None:
            self.lifecycle.names = names
        if self._gathers_in_forward:
            try:
                self._prefetch.attach(context)
            except BaseException:
                self.detach()
                raise
        zero.updates.append(self)

    def check_added(self, names: Mapping[Tensor, str]) -> None:
        if self.context is not None and self.context.names is not None:
            check_covered(names, self.context.names)
        if self.gather_wire is not None:
            _check_wire(self.gather_wire, self.optimizer, names)

    def detach(self) -> None:
        super().detach()
        if self in self.optimizer.updates:
            self.optimizer.updates.remove(self)
        self._prefetch.detach()

    def __repr__(self) -> str:
        parts = [
            self.optimizer_name,
            "deferred" if self.form.is_deferred else "interleaved",
            self._gathers_in_forward and "gather in forward",
            self.gather_wire is not None and f"gather_wire={self.gather_wire!r}",
            self.form.is_automatic and "automatic",
            self.releases_gradients and "release_gradients=True",
        ]
        return f"ZeroStep({', '.join(part for part in parts if part)})"


def check_covered(names: Mapping[Tensor, str], model: Collection[Tensor]) -> None:
    """Raises: ConfigurationError: ``model`` does not train one of the parameters with these ``names``."""
    outside = [name for p, name in names.items() if p.requires_grad and p not in model]
    if outside:
        raise ConfigurationError(
            f"{len(outside)} of {len(names)} parameters of the ZeroRedundancyOptimizer are not trained by this "
            f"model, the first is {outside[0]}: build it from this model's ddp.parameters()"
        )


def _check_wire(wire: object, zero: ZeroRedundancyOptimizer, names: Mapping[Tensor, str]) -> None:
    """Raises: ConfigurationError: parameters with these ``names`` cannot be gathered through ``wire``."""
    if not isinstance(wire, Wire) or isinstance(wire, TopK) or wire.is_stochastic:
        raise ConfigurationError(
            f"gather_wire is a wire that sends every value and rounds to nearest, such as BFloat16() or Int8(), got "
            f"{short_repr(wire)}"
        )
    if zero.partition == "parameter":
        raise ConfigurationError(
            f"gather_wire={wire!r} encodes chunks of parameters, but partition='parameter' sends whole ones: use "
            "ZeroRedundancyOptimizer(..., partition='element') with an optimizer such as AdamW, or leave gather_wire "
            "out"
        )
    if lacking := [name for p, name in names.items() if zero.master_dtype_of(p) is None]:
        raise ConfigurationError(
            f"gather_wire={wire!r} rounds parameters on their way, and {lacking[0]} has no master to update from: use "
            "ZeroRedundancyOptimizer(..., master_dtype=torch.float32)"
        )


def _check_same_group(model: dist.ProcessGroup, zero: dist.ProcessGroup) -> None:
    """Raises: ConfigurationError: the two groups have different ranks."""
    theirs, ours = dist.get_process_group_ranks(model), dist.get_process_group_ranks(zero)
    if theirs != ours:
        raise ConfigurationError(
            f"the model is on ranks {theirs}, but the ZeroRedundancyOptimizer on ranks {ours}: give both the same "
            "process_group"
        )


# Under the names of PyTorch.


def hook_with_zero_step(
    hook: Stage | Callable[..., Any],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> StageHook:
    """``chain(hook, ZeroStep(zero, deferred=True, automatic=True))`` for ``ddp.register_comm_hook(hook_state, ...)``,
    whose ``hook_state`` becomes the state of ``hook``, a communication hook or a reducer.

    The loop calls no ``zero.step()`` (a call does nothing) and calls ``zero_grad()`` as usual. ``shard_buckets`` is
    accepted for compatibility; every bucket is divided among the ranks.

    Raises:
        ConfigurationError: ``zero`` was not made with ``overlap_with_ddp=True``, or has others than ``ddp``.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    >>> loss_fn(ddp(x), y).backward()
    """
    return _hook(hook, ddp, zero, deferred=True, name="hook_with_zero_step")


def hook_with_zero_step_interleaved(
    hook: Stage | Callable[..., Any],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> StageHook:
    """As :func:`hook_with_zero_step`, with each bucket updated and gathered in backward.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    >>> ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    >>> loss_fn(ddp(x), y).backward()
    """
    return _hook(hook, ddp, zero, deferred=False, name="hook_with_zero_step_interleaved")


def _hook(hook: Any, ddp: Any, zero: ZeroRedundancyOptimizer, *, deferred: bool, name: str) -> StageHook:
    ddp = check_ddp(ddp)
    update = ZeroStep(zero, deferred=deferred, automatic=True)
    if not zero.overlap_with_ddp:
        raise ConfigurationError(
            f"{name} updates in backward: make the ZeroRedundancyOptimizer with overlap_with_ddp=True"
        )
    check_covered({shard.parameter: shard.name for shard in zero.shards.values()}, set(ddp.parameters()))

    def build(hook_state: Any) -> Chain:
        return chain(as_stage(hook, hook_state), update)

    group = ddp.process_group
    return StageHook(build, f"{name}({getattr(hook, '__name__', repr(hook))})", group_of=lambda hook_state: group)
