"""The stage that makes the sharded update, in backward or after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import check_flag, described, is_one_of, told
from overlap._torch.optimizer import mark_stepped, unwrapped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext
from overlap.hooks.transforms.clip import Clipping
from overlap.hooks.wires import Wire, redistribute
from overlap.join.active import active_join
from overlap.optim.grad_scaler import LossScale
from overlap.optim.phases import SCALED_IN_BACKWARD, SCALED_UNDER_JOIN, Phase
from overlap.optim.skipping import SkippedUpdates
from overlap.optim.update_stage import UpdateStage
from overlap.optim.zero.backward_update import BackwardUpdate
from overlap.optim.zero.bucket_shards import in_elements, reduced
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.parameter_gathers import ParameterGathers
from overlap.optim.zero.parameter_groups import check_covered, check_same_group
from overlap.optim.zero.reduce_scatter import ReduceScatter
from overlap.optim.zero.sharded_wires import ShardedWires
from overlap.optim.zero.step_update import StepUpdate
from overlap.optim.zero.wire_options import check_wires

__all__ = ["ZeroStep"]

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

    Without a reducer before it, this rank has the mean only of the elements that it owns, so ``.grad`` can neither be
    read nor changed after backward: an attempt raises ``TrainingLoopError``. After a reducer ``.grad`` is the mean;
    read-only until ``step()`` where the update was made in backward. It is cleared before the model's next forward.

    Args:
        zero: the optimizer; the model must have all its trainable parameters. Other parameters of the model are
            averaged and keep their ``.grad``.
        deferred: update in ``zero.step()``.
        clip_grad_norm: scale the averaged gradients to at most this global norm first; implies ``deferred``. After a
            reducer that is ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip_grad_norm)`` bit for bit (of the
            parameters that ``zero`` has), since norms are summed in the model's order; where the stage reduces by
            itself, the ranks' parts are summed, and the norm is the same up to the order of summation.
        norm_type: the type of the norm; ``float("inf")`` for the maximum.
        gather: ``"backward"`` waits for new parameters before backward (or a deferred ``zero.step()``) returns;
            ``"forward"`` gathers them during the next forward. Looking a parameter up in the model waits for it;
            call ``zero.wait()`` before you read one that you hold yourself, in a list or in ``param_groups``.
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
        release_gradients: free a bucket's memory as soon as it is updated and gathered, and allocate it again for its
            next gradient, so that gradients hardly add to the peak. ``.grad`` cannot be read after backward. Needs
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

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    >>> chain(ZeroStep(zero)).register(ddp)
    <chain(ZeroStep(AdamW, interleaved)) registered>
    >>> before = model[0].weight.clone()
    >>> loss_fn(ddp(x), y).backward()  # reduces, updates and gathers
    >>> zero.step()
    >>> bool((model[0].weight != before).any())
    True
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
        if not is_one_of(gather, "backward", "forward"):
            raise ConfigurationError(f"gather is 'backward' or 'forward', got {told(gather)}")
        check_flag("automatic", automatic)
        check_wires(reduce_wire, gather_wire, error_feedback=error_feedback)
        super().__init__(
            deferred=deferred,
            automatic=automatic,
            clip_grad_norm=clip_grad_norm,
            norm_type=norm_type,
            step="zero.step()",
            deferred_form="ZeroStep(zero, deferred=True)",
            edits="chain(AllReduce(), ZeroStep(zero, deferred=True))",
            clip="ZeroStep(zero, clip_grad_norm=max_norm), or zero.clip_grad_norm_(max_norm) with deferred=True,",
            skip="stage.skip_update()" if automatic else "zero.skip_update()",
            adds_up=False,
            release_gradients=release_gradients,
        )
        self.zero = zero
        self.reduce_wire, self.gather_wire, self.error_feedback = reduce_wire, gather_wire, error_feedback
        self._wires = ShardedWires(
            self, zero, reduce_wire=reduce_wire, gather_wire=gather_wire, error_feedback=error_feedback
        )
        self.exchange = self._wires.exchange
        """How ranks exchange gradients and parameters."""
        self._gathers = ParameterGathers(
            zero,
            self.exchange,
            self.lifecycle,
            in_forward=gather == "forward",
            are_differences=self.gathers_differences,
        )
        self._backward = BackwardUpdate(
            zero,
            self.exchange,
            self.lifecycle,
            clipping=self.clipping,
            is_deferred=self.is_deferred,
            gathers_later=self._gathers.are_in_forward,
        )
        self._in_step = StepUpdate(self._backward, updates_in_step=self.updates_in_step, gather=self._gather)
        # Whether step() of other sharded updates of the chain issues collectives, too, in the order of the calls.
        self._is_in_step_with_others = False

    def defer(self) -> None:
        super().defer()
        self._backward.is_deferred, self._in_step.updates_in_step = self.is_deferred, self.updates_in_step

    @property
    def stepped(self) -> Optimizer:
        return self.zero.optim

    @property
    def updates_after_backward(self) -> bool:
        return self.updates_in_step or self._gathers.are_in_forward

    @property
    def signature(self) -> str:
        return f"{self!r} by {self.zero.partition}"

    @property
    def reduces(self) -> bool:
        return True

    def reducer_for(self, updates: Sequence[Stage]) -> ReduceScatter:
        return ReduceScatter.of([update for update in updates if isinstance(update, ZeroStep)])

    def passed(self, bucket: Bucket) -> Bucket:
        return bucket if bucket.is_mean else reduced(bucket, self._backward.shards.of(bucket))

    @property
    def updated(self) -> Sequence[Tensor]:
        return [shard.parameter for shard in self.zero.shards.values()]

    @property
    def optimizer_name(self) -> str:
        return type(self.zero.optim).__name__

    def check_together(self, stages: Sequence[Stage]) -> None:
        super().check_together(stages)
        self._backward.follows_its_reducer = any(
            isinstance(stage, ReduceScatter) and self.zero in stage.zeros for stage in stages
        )
        self._wires.check_reducer(next((stage for stage in stages if stage.role is Role.REDUCER), None))
        in_step = [stage for stage in stages if isinstance(stage, ZeroStep) and stage.updates_in_step]
        self._is_in_step_with_others = self in in_step and len(in_step) > 1

    def attach(self, context: StageContext) -> None:
        zero = self.zero
        if zero.stage is not None and zero.stage is not self:
            raise RegistrationError("this ZeroRedundancyOptimizer is registered already; .remove() that registration")
        check_same_group(context.group, zero.process_group)
        shards = zero.shards.values()
        if context.names is not None:
            check_covered(context.names, [shard.parameter for shard in shards], [shard.name for shard in shards])
        self._wires.check_named(context)
        zero.follow_strides()
        super().attach(context)
        if context.names is None:
            self.lifecycle.names = {shard.parameter: shard.name for shard in shards}
        try:
            self._wires.attach(context)
            self._gathers.attach(context)
        except BaseException:
            self._wires.detach()
            super().detach()
            raise
        self._backward.finds_unused = context.finds_unused
        zero.stage = self

    @property
    def gathers_differences(self) -> bool:
        return self._wires.gathers_differences

    def check_covers(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises: ConfigurationError: the model does not train one of ``parameters``."""
        if self.context is not None and self.context.names is not None:
            check_covered(self.context.names, parameters, names)

    def detach(self) -> None:
        super().detach()
        self._wires.detach()
        if self.zero.stage is self:
            self.zero.stage = None
        self._gathers.detach()

    def owns_gradient_of(self, parameter: Tensor) -> bool:
        return id(parameter) in self.zero.shards

    @property
    def skipped(self) -> SkippedUpdates:
        return self.zero.skipped

    def groups(self) -> Sequence[Mapping[str, Any]]:
        return self.zero.param_groups

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
        self._backward.begin()
        self.zero.begin()
        self._wires.begin(None if self.context is None else self.context.names)

    async def __call__(self, bucket: Bucket) -> None:
        await self._backward.run(in_elements(bucket))

    def after_backward(self, *, failed: bool) -> str | None:
        self._wires.settle(failed=failed)
        if self.releases_gradients:
            self.exchange.workspace.trim()  # For the forward, as the buckets.
        if failed:
            was_under_way = self.lifecycle.phase is Phase.BACKWARD
            self._fail()
            return _PARTLY_UPDATED if was_under_way and not self.is_deferred else None
        self.lifecycle.has_parts = not self._backward.has_whole_mean
        if self.leaves_update:
            self._backward.tell_verdict()
            self.lifecycle.on_reduced()
            self._in_step.note_backward()
            return None
        if self._gathers.are_in_forward and not self.lifecycle.veto.stops:
            try:
                self._gather()
            except BaseException:
                self._fail()
                raise
        outcome = Phase.STEPPED if self.lifecycle.is_replay else self.lifecycle.outcome
        if outcome is Phase.STEPPED and not self.is_deferred:
            self._backward.end_step(self.lifecycle.veto)
        self.note_released()
        self.lifecycle.on_reduced(outcome)
        if self.is_automatic:
            mark_stepped(self.zero)
        self.refuse_use_elsewhere()
        return None

    def _fail(self) -> None:
        self.lifecycle.on_failure()
        self.exchange.workspace.forget()

    def _gather(self) -> None:
        self._gathers.run(self._backward.gathers, self.context)

    def step(self, loss_scale: LossScale) -> None:
        """What is left of a step after backward, on the training thread."""
        if loss_scale.is_used and self.zero.is_joining:
            raise TrainingLoopError(SCALED_UNDER_JOIN)
        if loss_scale.is_used:
            self.check_unscaled()
        if self.leaves_update:
            self.wait()
        elif loss_scale.is_used:
            raise TrainingLoopError(SCALED_IN_BACKWARD.format(deferred=self.lifecycle.form.deferred))
        self._in_step.step(loss_scale)

    def step_replayed(self) -> None:
        """The same, on a rank that has run out of inputs; nothing where the others only accumulate."""
        self._in_step.step_replayed()
        self.wait()

    def clip_(self, clipping: Clipping, *, foreach: bool | None) -> Tensor:
        """Clip the gradients that :meth:`step` is going to apply; returns the global norm."""
        return self._in_step.clip_(clipping, foreach=foreach)

    def wait(self) -> None:
        """Wait for gathers that run during the next forward."""
        self._gathers.wait()

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of what the wires need on this rank; empty without wires and before the first pass.

        ``error`` by parameter's name, the rounding's ``generator``, and the ``rank`` and number of ``ranks`` that it
        belongs to. True weights are in the optimizer's state, as ``master_param``.
        """
        self.wait()
        return {} if self._wires.memory is None else self._wires.memory.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, before or after registering.

        Raises:
            ConfigurationError: it has errors and this stage keeps none, or it is another model's or another rank's; for
                another number of ranks, see :meth:`redistribute`. If the stage is not yet registered, registering
                raises the latter.
        """
        if self._wires.memory is None:
            super().load_state_dict(state_dict)
        else:
            self._wires.memory.load_state_dict(state_dict)

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        parts = [self.optimizer_name, "deferred" if self.is_deferred else "interleaved"]
        if self.clipping is not None:
            parts.append(f"clip_grad_norm={self.clipping.max_norm} of norm {self.clipping.norm_type:g}")
        if self._gathers.are_in_forward:
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
