"""The stage that makes the sharded update, in backward or after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.optimizer import mark_stepped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext, all_reduce, whole_pass
from overlap.optim.clipping import Clipping
from overlap.optim.unused import used_on_any_rank
from overlap.optim.zero.bucket_shards import BucketShards, shards_of_bucket
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.parameter_groups import check_covered, check_same_group
from overlap.optim.zero.passes import PARTLY_UPDATED, Pass
from overlap.optim.zero.prefetch import ParameterPrefetch
from overlap.optim.zero.sharded_gradients import FiniteVote, ShardedNorm
from overlap.optim.zero.without_hooks import Scaling

__all__ = ["ZeroStep"]


class ZeroStep(Stage):
    """Each rank updates its part of a bucket's parameters and gathers the others' parts.

    If it is first in its chain, the stage reduce-scatters the bucket itself, and sends as much as DDP's all-reduce.
    After a reducer, each rank updates its part with the reducer's result.

    *Interleaved* (default): each bucket is updated as soon as it is reduced, while backward computes the next ones.
    *Deferred* (``deferred=True``, or ``clip_grad_norm``): all buckets are updated at once in ``zero.step()``, as
    clipping by the global norm and ``GradScaler`` need. Call ``zero.step()`` once for each synchronized backward in
    either case.

    After backward ``.grad`` holds the mean where this rank owns it, and elsewhere this rank's own gradient divided by
    ``W`` (after a reducer: the reducer's result). It is cleared before the model's next forward.

    Args:
        zero: the optimizer; the model must have all its trainable parameters. Other parameters of the model are
            averaged and keep their ``.grad``.
        deferred: update in ``zero.step()``.
        clip_grad_norm: scale the averaged gradients to at most this global norm first; implies ``deferred``.
        norm_type: the type of the norm; ``float("inf")`` for the maximum.
        gather: ``"backward"`` waits for new parameters before backward (or a deferred ``zero.step()``) returns;
            ``"forward"`` gathers them during the next forward, whose modules wait for what they need. Call
            ``zero.wait()`` before you read parameters in any other way.
        automatic: backward does everything, a deferred update with its last bucket; the loop calls no ``step()``.

    Issues, per bucket: one reduce-scatter, if first; one all-gather; if DDP looks for unused parameters, one all-reduce
    of one byte per parameter. Deferred and first: one all-reduce of a number per backward, so that all ranks know of a
    gradient that is not finite.

    Raises:
        ConfigurationError: an argument is out of range, or (at registration) the optimizer has parameters that the
            model does not have.
        TrainingLoopError: in ``backward``, if ``zero.step()`` was not called after the backward before.
    """

    role = Role.UPDATE

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        *,
        deferred: bool = False,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        gather: str = "backward",
        automatic: bool = False,
    ) -> None:
        if not isinstance(zero, ZeroRedundancyOptimizer):
            raise ConfigurationError(
                f"ZeroStep takes a ZeroRedundancyOptimizer, got {type(zero).__name__}; for an optimizer that every "
                "rank holds in full use chain(AllReduce(), Step(optimizer))"
            )
        if gather not in ("backward", "forward"):
            raise ConfigurationError(f"gather is 'backward' or 'forward', got {gather!r}")
        self.zero = zero
        self.clipping = None if clip_grad_norm is None else Clipping(clip_grad_norm, norm_type)
        self.is_deferred = deferred or self.clipping is not None
        self.is_automatic = automatic
        self._prefetch = ParameterPrefetch() if gather == "forward" else None
        self._vote = FiniteVote()
        self._names: Mapping[Tensor, str] = {}
        self._context: StageContext | None = None
        self._shards_by_bucket: dict[tuple[int, ...], BucketShards | None] = {}
        self._used: set[int] = set()
        self._pass = Pass()
        self._awaits_step = False
        self._clears = False
        self._has_failed = False

    @property
    def signature(self) -> str:
        return f"{self!r} by {self.zero.partition}"

    @property
    def reduces(self) -> bool:
        return True

    @property
    def _waits_for_step(self) -> bool:
        """Whether the update is left to ``zero.step()``."""
        return self.is_deferred and not self.is_automatic

    def attach(self, context: StageContext) -> None:
        zero = self.zero
        if zero.stage is not None and zero.stage is not self:
            raise RegistrationError("this ZeroRedundancyOptimizer is registered already; .remove() that registration")
        check_same_group(context.group, zero.process_group)
        if context.finds_unused and not self._waits_for_step and context.device.type != "cpu":
            raise UnsupportedError(
                "with find_unused_parameters or static_graph an update in backward would have the host wait to learn "
                "which parameters no rank used; use ZeroStep(zero, deferred=True)"
            )
        if context.names is not None:
            shards = zero.shards.values()
            check_covered(context.names, [shard.parameter for shard in shards], [shard.name for shard in shards])
        self._context = context
        self._names = context.names or {}
        if self._prefetch is not None:
            self._prefetch.attach(context, zero.shards.keys())
        zero.stage = self

    def check_covers(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises: ConfigurationError: the model does not train one of ``parameters``."""
        if self._context is not None and self._context.names is not None:
            check_covered(self._context.names, parameters, names)

    def detach(self) -> None:
        # A later backward, which no stage clears gradients for, must not add to those that were applied.
        self.before_forward()
        self._pass, self._awaits_step = Pass(), False
        if self.zero.stage is self:
            self.zero.stage = None
        self._context = None
        if self._prefetch is not None:
            self._prefetch.detach()

    def forget_shards(self) -> None:
        """The shards have changed: those of each bucket are looked up again."""
        self._shards_by_bucket.clear()

    def before_forward(self) -> None:
        if self._has_failed:
            # After a failed backward some gradients are reduced and some are not, so all are cleared.
            self._clear(shard.parameter for shard in self.zero.shards.values())
        elif self._clears:
            self._clear(p for p in self._pass.reduced.values() if id(p) in self.zero.shards)

    def _clear(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None
        self._pass.reduced.clear()
        self._clears = self._has_failed = False

    def before_backward(self, *, is_replay: bool) -> None:
        self.wait()
        if is_replay:
            self.before_forward()  # A replay has no forward, where gradients are cleared.
        if self._awaits_step and not is_replay:
            raise TrainingLoopError(
                "a second backward began before zero.step() was called for the first: call it after each "
                "synchronized backward, or run all but the last backward of a step under ddp.no_sync()"
            )
        if is_replay and not self.zero.is_joining and (self._waits_for_step or self._prefetch is not None):
            raise TrainingLoopError(f"{self!r} also acts outside of backward: use `with Join([ddp, zero])`")
        self._pass = Pass(is_replay=is_replay, is_open=True)
        self._vote.begin()
        self.zero.begin()

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.parameters[0].is_complex() and not bucket.buffer.is_complex():
            # DDP's buffer holds complex gradients as pairs of real numbers; a shard's elements are the complex ones.
            bucket = replace(bucket, buffer=torch.view_as_complex(bucket.buffer.view(-1, 2)))
        shards = self._shards_of(bucket)
        self._pass.note(bucket, shards)
        if shards is not None:
            await self._exchange_gradients(bucket, shards)
        elif not bucket.is_mean:
            bucket.buffer.mul_(1 / bucket.divisor)
            await all_reduce(bucket.buffer, group=bucket.group)
        if self._waits_for_step:
            if not bucket.is_mean:
                await self._vote.cast(bucket)
        elif self.is_deferred:
            await self._update_together(bucket)
        else:
            self.zero.update(self._pass.of(bucket))
        if not self._waits_for_step and shards is not None and self._prefetch is None:
            await self.zero.exchange.gather(shards, bucket.group)

    async def _exchange_gradients(self, bucket: Bucket, shards: BucketShards) -> None:
        if not bucket.is_mean:
            await self.zero.exchange.reduce(bucket, shards)
        finds_unused = None if self._context is None else self._context.finds_unused
        parameters = [shard.parameter for shard in shards]
        used = await used_on_any_rank(bucket, parameters, finds_unused, used_before=self._used)
        kept = {id(shard) for shard, is_used in zip(shards, used, strict=True) if is_used}
        self._used.difference_update(map(id, parameters))
        self._used.update(id(shard.parameter) for shard in shards if id(shard) in kept)
        gradients = shards.gradients(bucket.buffer)
        pairs = [pair for pair in zip(shards.owned, gradients, strict=True) if id(pair[0]) in kept]
        if self._waits_for_step:
            self._vote.look([gradient for _, gradient in pairs])
            # DDP sets no .grad on a rank that replays, and its buffers are gone afterwards.
            pairs = [(shard, gradient.clone()) for shard, gradient in pairs] if bucket.is_replay else []
        self._pass.hold(bucket, pairs)

    async def _update_together(self, bucket: Bucket) -> None:
        await whole_pass()
        if bucket.is_last:
            pairs = self._pass.all_held()
            if self.clipping is not None:
                norm = ShardedNorm(self.clipping, [gradient for _, gradient in pairs], bucket.buffer.device)
                await all_reduce(norm.partial, op=norm.op, group=bucket.group)
                norm.clip_()
            self.zero.update(pairs)
        await whole_pass()

    def _shards_of(self, bucket: Bucket) -> BucketShards | None:
        key = tuple(map(id, bucket.parameters))
        if key not in self._shards_by_bucket:
            zero = self.zero
            is_even = zero.partition == "element"
            # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
            zero.exchange.workspace.trim()
            self._shards_by_bucket[key] = shards_of_bucket(
                bucket.parameters, zero.shards, rank=zero.rank, is_even=is_even
            )
        return self._shards_by_bucket[key]

    def after_backward(self, *, failed: bool) -> str | None:
        self._pass.close()
        if failed:
            self._awaits_step, self._clears, self._has_failed = False, False, True
            self.zero.exchange.workspace.forget()
            return None if self.is_deferred else PARTLY_UPDATED
        self._awaits_step = not (self.is_automatic or self._pass.is_replay)
        self._clears = self.is_automatic or self._pass.is_replay or not self.is_deferred
        if self._waits_for_step:
            self._vote.tell(self.zero.shards.values())
        elif self._prefetch is not None:
            self._gather()
        if self.is_automatic:
            mark_stepped(self.zero)
        elif not self.is_deferred:
            self._pass.seal()
        return None

    def _gather(self) -> None:
        """Gather the parameters after backward, those of the first layers first."""
        prefetch = self._prefetch or ParameterPrefetch()
        assert self._context is not None, "gathers run while the stage is attached"
        prefetch.begin(self._context, self._pass.buckets(), self.zero.exchange)
        # After all ranks have joined, DDP sends parameters to all ranks. A replay must not wait here, inside of DDP's
        # join hook: the optimizer's own join hook waits.
        if self._prefetch is None or (self.zero.is_joining and not self._pass.is_replay):
            prefetch.wait()

    def step(self, scaling: Scaling) -> None:
        """Do what is left of the step after backward, on the training thread."""
        if self._waits_for_step:
            self.wait()
        if scaling.is_used and not self._waits_for_step:
            raise TrainingLoopError(
                "GradScaler decides after backward whether to step, but the parameters were updated in backward; "
                "use ZeroStep(zero, deferred=True) with it"
            )
        self._pass.check_complete(self._names)
        if not self._awaits_step:
            self._pass.check_reduced(self.zero.shards.values(), self._names)
            return
        self._pass.check_unchanged(self._names)
        self._awaits_step, self._clears = False, True
        if self._waits_for_step and not scaling.forbids_step():
            self._update_late(scaling)

    def step_replayed(self) -> None:
        """The same on a rank that has run out of inputs; nothing if the other ranks only accumulate."""
        if self._waits_for_step and self._pass.take_replay():
            self._update_late(Scaling(None, None))
        self.wait()

    def _update_late(self, scaling: Scaling) -> None:
        pairs = self._pass.late_pairs(self.zero.shards.values())
        gradients = [gradient for _, gradient in pairs]
        with torch.no_grad():
            scaling.unscale_(gradients)
            if self.clipping is not None:
                norm = ShardedNorm(self.clipping, gradients, self.zero.join_device)
                dist.all_reduce(norm.partial, op=norm.op, group=self.zero.process_group)
                norm.clip_()
            self.zero.update(pairs)
        self._gather()

    def wait(self) -> None:
        """Wait for gathers that run during the next forward."""
        if self._prefetch is not None:
            self._prefetch.wait()

    def __repr__(self) -> str:
        parts = [type(self.zero.optim).__name__, "deferred" if self.is_deferred else "interleaved"]
        if self.clipping is not None:
            parts.append(f"clip_grad_norm={self.clipping.max_norm} of norm {self.clipping.norm_type:g}")
        if self._prefetch is not None:
            parts.append("gather in forward")
        if self.is_automatic:
            parts.append("automatic")
        return f"ZeroStep({', '.join(parts)})"
