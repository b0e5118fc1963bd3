"""The sharded update that is left to ``step()``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from overlap.errors import TrainingLoopError, UnsupportedError
from overlap.hooks.transforms.clip import Clipping, ShardedNorm, in_model_order
from overlap.join.group_collectives import all_reduce
from overlap.optim.grad_scaler import LossScale
from overlap.optim.phases import Phase
from overlap.optim.veto import Veto
from overlap.optim.zero.backward_update import BackwardUpdate, Pairs
from overlap.optim.zero.sharding import Shard, raise_versions_of

__all__ = ["StepUpdate"]


class StepUpdate:
    """What ``step()`` does after a backward, from ``.grad``, of which each rank may have the mean in part only.

    Args:
        backward: the same update's part in backward, whose optimizer, lifecycle and clipping this shares.
        updates_in_step: whether the update is left to ``step()``.
        gather: brings what each rank owns of the parameters to all.
    """

    def __init__(self, backward: BackwardUpdate, *, updates_in_step: bool, gather: Callable[[], None]) -> None:
        self._backward = backward
        self.zero, self.lifecycle, self.clipping = backward.zero, backward.lifecycle, backward.clipping
        self.updates_in_step = updates_in_step
        self._gather = gather

    def note_backward(self) -> None:
        """Backward is over, and has left the update to ``step()``."""
        if not (self.lifecycle.is_replay or self.lifecycle.is_joining()):
            self._backward.used.note_gradients(self._reduced_shards())

    def step(self, loss_scale: LossScale) -> None:
        """What is left of a step, on the training thread."""
        lifecycle, parameters = self.lifecycle, [shard.parameter for shard in self.zero.shards.values()]
        lifecycle.check_step()
        pending = [p for p in parameters if p.grad is not None and not lifecycle.gradients.has_applied(p)]
        lifecycle.check_reduced(pending, applies_what_the_user_set=False)
        lifecycle.check_once()
        if lifecycle.phase is Phase.REDUCED and not loss_scale.skips_step(self.zero.optim):
            self._update_in_step(loss_scale)
        elif lifecycle.phase is Phase.APPLIED:
            self._backward.end_step(lifecycle.veto)
        lifecycle.on_step(parameters)

    def step_replayed(self) -> None:
        """The same, on a rank that has run out of inputs; nothing where the others only accumulate."""
        lifecycle = self.lifecycle
        if lifecycle.phase is Phase.REDUCED and lifecycle.is_replay:
            self._update_in_step(LossScale())
            lifecycle.on_step(shard.parameter for shard in self.zero.shards.values())

    @torch.no_grad()
    def clip_(self, clipping: Clipping, *, foreach: bool | None) -> Tensor:
        """Clip the gradients that ``step()`` is going to apply; returns the global norm."""
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
        if self._backward.has_whole_mean:
            return clipping.clip_(self._whole_gradients(), foreach=foreach)
        with self.lifecycle.gradients.opened():
            return self._clip_parts(clipping)

    def _clip_parts(self, clipping: Clipping) -> Tensor:
        for parameter in (shard.parameter for shard in self._reduced_shards()):
            grad = parameter.grad
            if grad is not None and grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
        gradients = [gradient for _, gradient in self._pairs_of_step()]
        return self._norm(clipping, gradients).clip_()

    @torch.no_grad()
    def _update_in_step(self, loss_scale: LossScale) -> None:
        if self.lifecycle.veto.stops:
            return
        try:
            self.zero.begin()  # Parameters may have been moved since backward.
            with self.lifecycle.gradients.opened():
                pairs = self._clipped_pairs(loss_scale)
                verdict = Veto(loss_scale.verdict_for(self.zero.optim))
                self._backward.update_at_once(pairs, Veto.of_any([self.lifecycle.veto, verdict]))
            raise_versions_of(self._reduced_shards())
            self._gather()
        except BaseException:
            self.lifecycle.on_update_failure()
            raise

    def _clipped_pairs(self, loss_scale: LossScale) -> Pairs:
        """Unscale and clip the gradients that ``step()`` applies, where that is asked for."""
        if self.clipping is not None and self._backward.has_whole_mean:
            whole = self._whole_gradients()
            loss_scale.unscale_(whole)
            self.clipping.clip_(whole)
            return self._pairs_of_step()
        pairs = self._pairs_of_step()
        gradients = [gradient for _, gradient in pairs]
        loss_scale.unscale_(gradients)
        if self.clipping is not None:
            self._norm(self.clipping, gradients).clip_()
        return pairs

    def _whole_gradients(self) -> list[Tensor]:
        """The mean gradients that ``step()`` applies, in the model's order; after a reducer all ranks have all."""
        if self.lifecycle.is_replay:
            return self._backward.take_whole()
        parameters = in_model_order((shard.parameter for shard in self._reduced_shards()), self.lifecycle.names)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _norm(self, clipping: Clipping, gradients: list[Tensor]) -> ShardedNorm:
        """Of all ranks' parts. Issues: one all-reduce of a number."""
        norm = ShardedNorm(clipping, gradients, self.zero.ownership.trained, self.zero.join_device)
        all_reduce(norm.partial, op=norm.op, group=self.zero.process_group)
        return norm

    def _reduced_shards(self) -> list[Shard]:
        gradients = self.lifecycle.gradients
        return [shard for shard in self.zero.shards.values() if gradients.has_reduced(shard.parameter)]

    def _pairs_of_step(self) -> Pairs:
        """What ``step()`` applies: parts of ``.grad``, or what was held on a rank that has none."""
        if self.lifecycle.is_replay:
            return self._backward.take_held()
        return [
            (shard, shard.gradient())
            for shard in self.zero.shards.values()
            if shard.own is not None
            and shard.parameter.grad is not None
            and self.lifecycle.gradients.has_reduced(shard.parameter)
        ]
