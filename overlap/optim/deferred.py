"""A deferred update that does not wait for ``step()``."""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from overlap.errors import UnsupportedError
from overlap.hooks import Bucket, whole_pass
from overlap.hooks.transforms.clip import Clipping, in_model_order
from overlap.join.active import active_join
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.overlapped import OverlappedOptimizer
from overlap.optim.share import Share
from overlap.optim.subset import grads_replaced, raise_versions, step_whole
from overlap.optim.unused import tell_used, used_on_any_rank

__all__ = ["DeferredUpdate"]


class DeferredUpdate:
    """Takes the buckets of a backward, and updates all parameters at once when the last is in: where the loop calls no
    ``step()``, and on a rank that replays. Elsewhere ``step()`` goes by ``.grad``, and nothing is taken.

    Args:
        optimizer: what updates.
        lifecycle: of the update.
        clipping: how to clip; ``None``: not.
        is_automatic: whether the loop calls no ``step()``.
    """

    def __init__(
        self,
        optimizer: OverlappedOptimizer,
        lifecycle: UpdateLifecycle,
        *,
        clipping: Clipping | None,
        is_automatic: bool,
    ) -> None:
        self.optimizer = optimizer
        self.lifecycle = lifecycle
        self.clipping = clipping
        self.is_automatic = is_automatic
        # Bucket by bucket, the parameters that were used, and their gradients.
        self._held: list[tuple[list[Tensor], list[Tensor]]] = []

    def clear(self) -> None:
        """A backward begins."""
        self._held.clear()

    async def take(self, bucket: Bucket, share: Share, finds_unused: bool | None) -> None:
        """``bucket`` is reduced, and ``share`` of it is the update's."""
        parameters = share.parameters
        # A rank that replays has no step() of its own to wait for, and learns here what the others' .grad tells them.
        is_told = finds_unused is not False and active_join(bucket.group) is not None
        if not (self.is_automatic or bucket.is_replay or is_told):
            return
        if bucket.is_replay and finds_unused and not (self.is_automatic or is_told):
            raise UnsupportedError(
                "PyTorch's Join with find_unused_parameters does not tell a rank without inputs which parameters the "
                "others used; use `with overlap.Join([ddp, optimizer])`, or the interleaved update"
            )
        if self.lifecycle.leaves_update and not bucket.is_replay and finds_unused:
            await tell_used(bucket, parameters)
            return
        used = await used_on_any_rank(bucket, parameters, finds_unused)
        if self.lifecycle.leaves_update and not bucket.is_replay:
            return
        self._held.append((list(compress(parameters, used)), list(compress(share.gradients(bucket), used))))
        await whole_pass()
        # The first to go on updates all: as soon as it is through, DDP may copy its gradients out of the bucket.
        if self._held:
            self._apply_all()

    @torch.no_grad()
    def _apply_all(self) -> None:
        held = {
            parameter: gradient
            for parameters, gradients in self._held
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }
        self._held.clear()
        if self.lifecycle.veto.stops:
            self.lifecycle.gradients.note_applied(held)
            return
        optimizer, groups = self.optimizer.optimizer, self.optimizer.param_groups
        every = [parameter for group in groups for parameter in group["params"]]
        if self.clipping is not None:
            ordered = in_model_order((one for one in every if one in held), self.lifecycle.names)
            self.clipping.clip_([held[parameter] for parameter in ordered])
        gradients = [held.get(parameter) for parameter in every]
        with grads_replaced(every, gradients), self.lifecycle.veto.passed_to(optimizer):
            step_whole(optimizer)
        raise_versions(list(held), groups)
        self.lifecycle.gradients.note_applied(held)
