"""The stage that makes the sharded update, in backward or after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import described
from overlap._torch.device import has_streams
from overlap._torch.optimizer import mark_stepped, unwrapped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext, all_reduce, whole_pass
from overlap.hooks.clipping import Clipping, ShardedNorm
from overlap.hooks.wires import Wire, redistribute
from overlap.hooks.wires.memory import WireMemory
from overlap.join.active import active_join
from overlap.optim.grad_scaler import LossScale
from overlap.optim.phases import SCALED_UNDER_JOIN, Phase
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.update_marks import UpdateMarks
from overlap.optim.update_stage import UpdateStage
from overlap.optim.veto import Veto
from overlap.optim.zero.bucket_shards import BucketShards, ShardsByBucket, in_elements, reduced
from overlap.optim.zero.division import check_steps_in_turn
from overlap.optim.zero.exchange import Gather
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.parameter_groups import check_covered, check_same_group
from overlap.optim.zero.prefetch import ParameterPrefetch
from overlap.optim.zero.reduce_scatter import ReduceScatter
from overlap.optim.zero.scale_vote import ScaleVote
from overlap.optim.zero.sharded_gradients import FiniteVote
from overlap.optim.zero.sharding import Shard
from overlap.optim.zero.used_shards import UsedShards
from overlap.optim.zero.wire_exchange import WireExchange
from overlap.optim.zero.wire_options import check_real, check_wires

__all__ = ["ZeroStep"]

Pairs = list[tuple[Shard, Tensor]]
"""Shards with the gradients of what this rank owns of them."""

_PARTLY_UPDATED = (
    "some parameters may have been updated by then, and not gathered on every rank: load a checkpoint before going on, "
    "or use ZeroStep(zero, deferred=True), which updates all or none"
)


class ZeroStep(UpdateStage):
    """Each rank updates its part of a bucket's parameters and gathers the others' parts.

    If it is first in its chain, the stage reduce-scatters the bucket itself, and sends as much as DDP's all-reduce.
    After a reducer, each rank updates its part with the reducer's result.

    *Interleaved* (default): each bucket is updated as soon as it is reduced, while backward computes the next ones.
    *Deferred* (``deferred=True``, or ``clip_grad_norm``): all buckets are updated at once in ``zero.step()``, as
    clipping by the global norm and ``GradScaler`` need. Call ``zero.step()`` once for each synchronized backward in
    either case, unless ``automatic``.

    After backward ``.grad`` holds the mean where this rank owns it, and elsewhere this rank's own gradient divided by
    ``W`` (after a reducer: the reducer's result). It is cleared before the model's next forward.

    Args:
        zero: the optimizer; the model must have all its trainable parameters. Other parameters of the model are
            averaged and keep their ``.grad``.
        deferred: update in ``zero.step()``.
        clip_grad_norm: scale the averaged gradients to at most this global norm first; implies ``deferred``.
        norm_type: the type of the norm; ``float("inf")`` for the maximum.
        gather: ``"backward"`` waits for new parameters before backward (or a deferred ``zero.step()``) returns;
            ``"forward"`` gathers them during the next forward. Whoever looks a parameter up in the model waits for
            it; call ``zero.wait()`` before you read one that you hold yourself, in a list or in ``param_groups``.
        automatic: backward does everything, a deferred update with its last bucket; the loop calls no ``step()``.
        reduce_wire: sends gradients to their owners in fewer bytes, such as ``Int4()``: the owner sums in fp32 what it
            decodes and its own part, which is not rounded. The stage then reduces itself; no reducer may be before it.
        gather_wire: sends new parameters in fewer bytes, such as ``Int8()``, as differences from the parameters that
            all ranks have (SDP4Bit, https://arxiv.org/abs/2410.15526). The optimizer steps true weights, which the
            owner keeps; all ranks, the owner too, add the same decoded differences to their parameters, so these are
            equal bit for bit, and the next difference holds what rounding left out. Takes a copy of this rank's part
            of the parameters, and one in the dtype of the true weights, ``master_dtype`` if that is wider.
        error_feedback: add what ``reduce_wire`` left out of a step's gradients to the next step's; takes one fp32 copy
            of the gradients, and in backward two. A pass with a mean that is not finite, or that fails, changes it on
            no rank.
        release_gradients: give a bucket's memory back as soon as it is updated and gathered, and take it again when its
            next gradient comes, so that gradients hardly add to the peak. ``.grad`` is ``None`` after backward. Needs
            ``DistributedDataParallel(..., gradient_as_bucket_view=True)``; see ``docs/memory.md``.

    Issues, per bucket: one reduce-scatter, if first; one all-gather; if DDP looks for unused parameters, one all-reduce
    of one byte per parameter. Deferred and first: one all-reduce of a number per backward, so that all ranks know of a
    gradient that is not finite. With ``error_feedback`` one all-reduce of a number per bucket. A wire sends one message
    to each other rank, of ``wire.codec(n).message_bytes`` bytes: in a reduction for the ``n`` elements of the bucket
    that are that rank's, in a gather for those that are this rank's (by element, all send as much as the largest).

    Raises:
        ConfigurationError: an argument is out of range, or (at registration) the optimizer has parameters that the
            model does not have.
        UnsupportedError: (at registration) a parameter that would travel through a wire is complex.
        TrainingLoopError: in ``backward``, if ``zero.step()`` was not called after the backward before, or if something
            else refers to a gradient that is to be released.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        *,
        deferred: bool | None = None,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        gather: str = "backward",
        automatic: bool = False,
        reduce_wire: Wire | None = None,
        gather_wire: Wire | None = None,
        error_feedback: bool = False,
        release_gradients: bool = False,
    ) -> None:
        zero = unwrapped(zero)
        if not isinstance(zero, ZeroRedundancyOptimizer):
            raise ConfigurationError(
                f"ZeroStep takes an overlap.ZeroRedundancyOptimizer, got {described(zero)}; for an optimizer that "
                "every rank holds in full use chain(AllReduce(), Step(optimizer))"
            )
        if gather not in ("backward", "forward"):
            raise ConfigurationError(f"gather is 'backward' or 'forward', got {gather!r}")
        check_wires(reduce_wire, gather_wire, error_feedback=error_feedback)
        super().__init__(
            deferred=deferred,
            automatic=automatic,
            clip_grad_norm=clip_grad_norm,
            norm_type=norm_type,
            step="zero.step()",
            deferred_form="ZeroStep(zero, deferred=True)",
            skip="stage.skip_update()" if automatic else "zero.skip_update()",
            adds_up=False,
            release_gradients=release_gradients,
        )
        self.zero = zero
        self.reduce_wire, self.gather_wire, self.error_feedback = reduce_wire, gather_wire, error_feedback
        wires = [wire for wire in (reduce_wire, gather_wire) if wire is not None]
        self._memory = WireMemory(self, error_feedback=error_feedback, wires=wires) if wires else None
        self.exchange = zero.exchange
        """How ranks exchange gradients and parameters."""
        if self._memory is not None:
            gathers = gather_wire if self.gathers_differences else None
            self.exchange = WireExchange.beside(
                zero.exchange, reduce_wire=reduce_wire, gather_wire=gathers, memory=self._memory
            )
        self._prefetch = ParameterPrefetch() if gather == "forward" else None
        self._vote = FiniteVote()
        self._scales = ScaleVote()
        # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
        self._shards = ShardsByBucket([zero.ownership], before_new=zero.exchange.workspace.trim)
        self._used = UsedShards()
        # Of the last backward: its buckets in their order, and what is to be applied to the shards of each.
        self._gathers: list[Gather] = []
        self._held: dict[int, Pairs] = {}
        # Whether a ReduceScatter of this optimizer comes before the stage.
        self._follows_its_reducer = False
        # Whether step() of other sharded updates of the chain issues collectives, too, in the order of the calls.
        self._is_in_step_with_others = False
        # Whether a reducer before the stage has left the mean in all of .grad.
        self._has_whole_mean = False

    @property
    def stepped(self) -> Optimizer:
        return self.zero.optim

    @property
    def _updates_beside_backward(self) -> bool:
        """Whether the CPU makes the update of a bucket while backward goes on."""
        return self.zero.offload is not None and not self.is_deferred

    @property
    def _gathers_after_backward(self) -> bool:
        return self._prefetch is not None or self._updates_beside_backward

    @property
    def updates_after_backward(self) -> bool:
        return self.updates_in_step or self._gathers_after_backward

    @property
    def signature(self) -> str:
        return f"{self!r} by {self.zero.partition}"

    @property
    def reduces(self) -> bool:
        return True

    def reducer_for(self, updates: Sequence[Stage]) -> ReduceScatter:
        return ReduceScatter.of([update for update in updates if isinstance(update, ZeroStep)])

    def passed(self, bucket: Bucket) -> Bucket:
        return bucket if bucket.is_mean else reduced(bucket, self._shards.of(bucket))

    @property
    def updated(self) -> Sequence[Tensor]:
        return [shard.parameter for shard in self.zero.shards.values()]

    @property
    def optimizer_name(self) -> str:
        return type(self.zero.optim).__name__

    def check_together(self, stages: Sequence[Stage]) -> None:
        super().check_together(stages)
        self._follows_its_reducer = any(
            isinstance(stage, ReduceScatter) and self.zero in stage.zeros for stage in stages
        )
        reducer = next((stage for stage in stages if stage.role is Role.REDUCER), None)
        is_own = isinstance(reducer, ReduceScatter) and reducer.exchange is self.exchange
        if self.reduce_wire is not None and reducer is not None and not is_own:
            raise ConfigurationError(
                f"{self!r} reduces by itself, so that {self.reduce_wire!r} can carry gradients to their owners, but "
                f"{reducer!r} before it has reduced them: leave that out, or use ZeroStep without reduce_wire"
            )
        in_step = [stage for stage in stages if isinstance(stage, ZeroStep) and stage.updates_in_step]
        self._is_in_step_with_others = self in in_step and len(in_step) > 1

    def attach(self, context: StageContext) -> None:
        zero = self.zero
        if zero.stage is not None and zero.stage is not self:
            raise RegistrationError("this ZeroRedundancyOptimizer is registered already; .remove() that registration")
        check_same_group(context.group, zero.process_group)
        if not self.is_deferred:
            check_steps_in_turn(type(zero.optim), zero.separability)
        shards = zero.shards.values()
        if context.names is not None:
            check_covered(context.names, [shard.parameter for shard in shards], [shard.name for shard in shards])
        if self.error_feedback and context.names is None:
            raise ConfigurationError(
                f"{self!r} remembers errors by the parameters' names, which are not known to a hook registered with "
                "ddp.register_comm_hook: use chain(...).register(ddp), or error_feedback=False"
            )
        zero.follow_strides()
        super().attach(context)
        if self._memory is not None:
            try:
                self._memory.attach(context)
                self._prepare_wires()
            except BaseException:
                self._memory.detach()
                super().detach()
                raise
        if context.names is None:
            self.lifecycle.names = {shard.parameter: shard.name for shard in shards}
        if self._prefetch is not None:
            try:
                self._prefetch.attach(context)
            except BaseException:
                if self._memory is not None:
                    self._memory.detach()
                super().detach()
                raise
        zero.stage = self

    def _prepare_wires(self) -> None:
        """Take note of the parameters that travel through wires, those added since, too.

        Raises:
            UnsupportedError: one is complex.
        """
        names = None if self.context is None else self.context.names
        shards = [shard for shard in self.zero.shards.values() if names is None or shard.parameter in names]
        check_real(shards)
        if self.gathers_differences:
            for shard in shards:
                shard.keep_true()

    @property
    def gathers_differences(self) -> bool:
        return self.gather_wire is not None and self.zero.world_size > 1

    def check_covers(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises: ConfigurationError: the model does not train one of ``parameters``."""
        if self.context is not None and self.context.names is not None:
            check_covered(self.context.names, parameters, names)

    def detach(self) -> None:
        super().detach()
        if self._memory is not None:
            self._memory.detach()
        if self.zero.stage is self:
            self.zero.stage = None
        if self._prefetch is not None:
            self._prefetch.detach()

    def check_skippable(self, context: StageContext) -> None:
        if self.zero.offload is None:
            super().check_skippable(context)
        self.may_skip = True  # On the CPU the verdict is there before the update.

    def owns_gradient_of(self, parameter: Tensor) -> bool:
        return id(parameter) in self.zero.shards

    @property
    def skipped(self) -> SkippedUpdates:
        return self.zero.skipped

    def marks_of(self, updated: list[Tensor], samples: bool) -> UpdateMarks:
        zero, names = self.zero, self.lifecycle.names
        named = {parameter: names.get(parameter, "a parameter") for parameter in updated}
        owned = {own: name for parameter, name in named.items() if (own := zero.shards[id(parameter)].own) is not None}
        if self._prefetch is not None:
            # Gathers that run during the next forward move versions until then, but not the values of this rank's part,
            # unless they are gathers of differences.
            sees_values = samples and not (has_streams(zero.ownership.device) or self.gathers_differences)
            shards = [(zero.shards[id(parameter)], name) for parameter, name in named.items()] if sees_values else []
            named = {shard.views[zero.rank]: name for shard, name in shards if shard.own is not None}
        return UpdateMarks(
            lambda: zero.param_groups,
            lambda: [zero.optim.state.get(own, {}) for own in owned],
            list(owned.values()),
            named,
            samples=samples,
        )

    def before_backward(self, *, is_replay: bool) -> None:
        self.wait()
        if self.skipped and not self.updates_in_step and self.lifecycle.is_joining():
            raise TrainingLoopError(
                "skip_update() under Join: ranks that have run out of inputs make the update in backward, and are not "
                "told that it is skipped; use ZeroStep(zero, deferred=True)"
            )
        if is_replay and not self.zero.is_joining and self.updates_after_backward:
            raise TrainingLoopError(f"{self!r} acts outside of backward, too: use `with Join([ddp, zero])`")
        if self._is_in_step_with_others and self.zero.is_joining and active_join(self.zero.process_group) is None:
            raise UnsupportedError(
                "PyTorch's Join does not tell a rank without inputs in which order the others call step() of several "
                "sharded optimizers: use `with overlap.Join([ddp, ...])`, or leave out deferred=True"
            )
        super().before_backward(is_replay=is_replay)
        self._gathers, self._held = [], {}
        self._vote.begin()
        self.zero.begin()
        if self._memory is not None:
            self._memory.begin()
            self._prepare_wires()

    async def __call__(self, bucket: Bucket) -> None:
        bucket = in_elements(bucket)
        shards = self._shards.of(bucket)
        self._has_whole_mean = bucket.is_mean and not self._follows_its_reducer
        self.lifecycle.gradients.note_reduced(bucket.parameters)
        if shards is not None:
            self._gathers.append(Gather(index=bucket.index, step=bucket.step, shards=shards))
            await self._exchange_gradients(bucket, shards)
        elif not bucket.is_mean:
            await self.exchange.average(bucket)
        if self.leaves_update:
            if not self._has_whole_mean:
                await self._vote.cast(bucket)
            return
        if self.is_deferred:
            await self._update_together(bucket)
        elif (offload := self.zero.offload) is not None:
            if shards is not None:
                offload.begin(bucket.index, self._held.pop(bucket.index, []), self.lifecycle.veto.found_inf)
        else:
            self._update(self._held.pop(bucket.index, []), self.lifecycle.veto)
        if shards is not None:
            self.lifecycle.gradients.note_applied(shard.parameter for shard in shards)
            # There is nothing new after a step that was left out; through a wire, rounding of earlier ones would go.
            if not (self._gathers_after_backward or self.lifecycle.veto.stops):
                await self.exchange.gather(shards, bucket.group)

    async def _exchange_gradients(self, bucket: Bucket, shards: BucketShards) -> None:
        if not bucket.is_mean:
            await self.exchange.reduce(bucket, shards)
        used = await self._used.of(
            bucket,
            shards,
            None if self.context is None else self.context.finds_unused,
            in_step=self.leaves_update,
            is_joining=self.lifecycle.is_joining(),
        )
        kept = {id(shard) for shard, is_used in zip(shards, used, strict=True) if is_used}
        gradients = shards.gradients(bucket.buffer)
        pairs = [pair for pair in zip(shards.owned, gradients, strict=True) if id(pair[0]) in kept]
        if self.leaves_update:
            self._vote.look([gradient for _, gradient in pairs])
            # DDP sets no .grad on a rank that replays, and its buffers are gone afterwards.
            pairs = [(shard, gradient.clone()) for shard, gradient in pairs] if bucket.is_replay else []
        self._held[bucket.index] = pairs

    async def _update_together(self, bucket: Bucket) -> None:
        await whole_pass()
        if bucket.is_last:
            pairs = self._all_held()
            if self.clipping is not None:
                norm = ShardedNorm(self.clipping, [gradient for _, gradient in pairs], bucket.buffer.device)
                await all_reduce(norm.partial, op=norm.op, group=bucket.group)
                norm.clip_()
            self._update(pairs, self.lifecycle.veto)
        await whole_pass()

    def _update(self, pairs: Pairs, veto: Veto) -> None:
        if not veto.stops:
            self.zero.update(pairs, veto)

    def _all_held(self) -> Pairs:
        held, self._held = self._held, {}
        return [pair for pairs in held.values() for pair in pairs]

    def after_backward(self, *, failed: bool) -> str | None:
        if self._memory is not None:
            self._memory.settle(failed=failed)
        if failed:
            was_under_way = self.lifecycle.phase is Phase.BACKWARD
            self._fail()
            return _PARTLY_UPDATED if was_under_way and not self.is_deferred else None
        if self.leaves_update:
            self._vote.tell(self.zero.shards.values())
            self.lifecycle.on_reduced()
            if not (self.lifecycle.is_replay or self.lifecycle.is_joining()):
                self._used.note_gradients(self._reduced_shards())
            if not (self._has_whole_mean or self.lifecycle.is_replay):
                self._scales.note(self._reduced_shards())
            return None
        if self._gathers_after_backward and not self.lifecycle.veto.stops:
            try:
                self._gather()
            except BaseException:
                self._fail()
                raise
        self.note_released()
        self.lifecycle.on_reduced(Phase.STEPPED if self.lifecycle.is_replay else None)
        if self.is_automatic:
            mark_stepped(self.zero)
        self.refuse_use_elsewhere()
        return None

    def _fail(self) -> None:
        self.lifecycle.on_failure()
        self.exchange.workspace.forget()
        if self.zero.offload is not None:
            self.zero.offload.forget()

    def _gather(self) -> None:
        """Outside of a backward: bring what each rank owns to all, the first layers' parameters first."""
        prefetch = self._prefetch or ParameterPrefetch()
        assert self.context is not None, "gathers run while the stage is attached"
        # The last bucket has the first layers, which the next forward needs first. On the CPU the first is done first.
        gathers = self._gathers if self._updates_beside_backward else list(reversed(self._gathers))
        if self._prefetch is not None and not self.gathers_differences:
            gathers = [replace(gather, shards=part) for gather in gathers for part in gather.shards.parts]
        prefetch.begin(self.context, gathers, self.exchange, before=self._bring_up)
        # When all have joined DDP brings parameters to all. A replay must not wait inside of DDP's shadow: its hook
        # does.
        if self._prefetch is None or (self.zero.is_joining and not self.lifecycle.is_replay):
            prefetch.wait()

    def _bring_up(self, gather: Gather) -> None:
        if self.zero.offload is not None:
            self.zero.offload.finish(gather.index)

    def step(self, loss_scale: LossScale) -> None:
        """What is left of a step after backward, on the training thread."""
        if loss_scale.is_used and self.zero.is_joining:
            raise TrainingLoopError(SCALED_UNDER_JOIN)
        if loss_scale.is_used:
            self.check_unscaled()
        if self.leaves_update:
            self.wait()
        elif loss_scale.is_used:
            raise TrainingLoopError(
                "GradScaler decides after backward whether to step, but the parameters were updated in backward; "
                "use ZeroStep(zero, deferred=True) with it"
            )
        lifecycle, parameters = self.lifecycle, [shard.parameter for shard in self.zero.shards.values()]
        lifecycle.check_step()
        pending = [p for p in parameters if p.grad is not None and not lifecycle.gradients.has_applied(p)]
        lifecycle.check_reduced(pending, applies_what_the_user_set=False)
        lifecycle.check_once()
        if lifecycle.phase is Phase.REDUCED and not loss_scale.skips_step(self.stepped):
            self._update_in_step(loss_scale)
        lifecycle.on_step(parameters)

    def step_replayed(self) -> None:
        """The same, on a rank that has run out of inputs; nothing where the others only accumulate."""
        lifecycle = self.lifecycle
        if lifecycle.phase is Phase.REDUCED and lifecycle.is_replay:
            self._update_in_step(LossScale())
            lifecycle.on_step(shard.parameter for shard in self.zero.shards.values())
        self.wait()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip what ``step()`` is going to apply; returns the global norm."""
        if not self.updates_in_step:
            raise TrainingLoopError(
                "zero.clip_grad_norm_() after backward, but the update had been made in backward: use "
                "ZeroStep(zero, deferred=True), or ZeroStep(zero, clip_grad_norm=...) without the call"
            )
        if self.zero.is_joining:
            raise UnsupportedError(
                "under Join a rank that has run out of inputs calls nothing: use ZeroStep(zero, clip_grad_norm=...) "
                "instead of zero.clip_grad_norm_()"
            )
        if self.lifecycle.phase is not Phase.REDUCED:
            raise TrainingLoopError(
                "zero.clip_grad_norm_() clips the mean over ranks: call it between a synchronized backward and step()"
            )
        parameters = [
            s.parameter for s in self.zero.shards.values() if self.lifecycle.gradients.has_reduced(s.parameter)
        ]
        if self._has_whole_mean:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        self._check_scales()
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
        gradients = [gradient for _, gradient in self._pairs_of_step()]
        norm = ShardedNorm(Clipping(max_norm, norm_type), gradients, self.zero.join_device)
        dist.all_reduce(norm.partial, op=norm.op, group=self.zero.process_group)
        if error_if_nonfinite and not bool(torch.isfinite(norm.total)):
            raise TrainingLoopError(
                f"the total norm of order {norm_type} of the mean gradients is non-finite, so they cannot be clipped; "
                "to clip them all the same, set error_if_nonfinite=False"
            )
        total = norm.clip_()
        self._scales.note(self._reduced_shards())
        return total

    @torch.no_grad()
    def _update_in_step(self, loss_scale: LossScale) -> None:
        if self.lifecycle.veto.stops:
            return
        try:
            self.zero.begin()  # Parameters may have been moved since backward.
            pairs = self._pairs_of_step()
            if not (self._has_whole_mean or self.zero.is_joining):
                self._check_scales()
            gradients = [gradient for _, gradient in pairs]
            loss_scale.unscale_(gradients)
            if self.clipping is not None:
                norm = ShardedNorm(self.clipping, gradients, self.zero.join_device)
                dist.all_reduce(norm.partial, op=norm.op, group=self.zero.process_group)
                norm.clip_()
            self._update(pairs, Veto.of_any([self.lifecycle.veto, Veto(loss_scale.verdict_for(self.stepped))]))
            self._gather()
        except BaseException:
            self.lifecycle.on_update_failure()
            raise

    def _check_scales(self) -> None:
        shards = list(self.zero.shards.values())
        self._scales.check(shards, self.zero.process_group, self.zero.join_device)

    def _reduced_shards(self) -> list[Shard]:
        gradients = self.lifecycle.gradients
        return [shard for shard in self.zero.shards.values() if gradients.has_reduced(shard.parameter)]

    def _pairs_of_step(self) -> Pairs:
        """What ``step()`` applies: parts of ``.grad``, or what was held on a rank that has none."""
        if self.lifecycle.is_replay:
            return self._all_held()
        return [
            (shard, shard.gradient())
            for shard in self.zero.shards.values()
            if shard.own is not None
            and shard.parameter.grad is not None
            and self.lifecycle.gradients.has_reduced(shard.parameter)
        ]

    def wait(self) -> None:
        """Wait for gathers that run during the next forward."""
        if self._prefetch is not None:
            self._prefetch.wait()

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of what the wires need on this rank; empty without wires and before the first pass.

        ``error`` by parameter's name, the rounding's ``generator``, the ``buckets`` of the last pass, and the ``rank``
        and number of ``ranks`` that it belongs to. True weights are in the optimizer's state, as ``master_param``.
        """
        self.wait()
        return {} if self._memory is None else self._memory.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, before or after registering.

        Raises:
            ConfigurationError: it has errors and this stage keeps none, or it is another model's or another rank's; for
                another number of ranks, see :meth:`redistribute`. If the stage is not yet registered, registering
                raises the latter.
        """
        if self._memory is None:
            super().load_state_dict(state_dict)
        else:
            self._memory.load_state_dict(state_dict)

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        parts = [self.optimizer_name, "deferred" if self.is_deferred else "interleaved"]
        if self.clipping is not None:
            parts.append(f"clip_grad_norm={self.clipping.max_norm} of norm {self.clipping.norm_type:g}")
        if self._prefetch is not None:
            parts.append("gather in forward")
        if self.is_automatic:
            parts.append("automatic")
        if self.reduce_wire is not None:
            parts.append(f"reduce_wire={self.reduce_wire!r}")
        if self.gather_wire is not None:
            parts.append(f"gather_wire={self.gather_wire!r}")
        if self.error_feedback:
            parts.append("error_feedback=True")
        if self.releases_gradients:
            parts.append("release_gradients=True")
        return f"ZeroStep({', '.join(parts)})"
