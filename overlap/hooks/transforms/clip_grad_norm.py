"""Clipping by the global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._checks import check_flag
from overlap._torch.device import has_streams, hold
from overlap._torch.foreach import norms
from overlap.errors import TrainingLoopError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.clipping import Clipping, ShardedNorm
from overlap.hooks.collectives import all_reduce
from overlap.hooks.context import StageContext
from overlap.hooks.transforms.transform import WholePassTransform

__all__ = ["ClipGradNorm"]


class ClipGradNorm(WholePassTransform):
    """Scales the gradients of the whole model so that their norm is at most ``max_norm``.

    After the reducer this is ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)`` between backward and
    ``step()``, bit for bit; before it, each rank clips its own gradient by its own norm. It waits for all buckets, so
    updates after it run when backward has computed everything; they may be of any form. After a reduce-scatter each
    rank takes the norm of its parts, and the norm is the same up to the order of summation; the largest element is the
    same.

    With ``GradScaler`` gradients in backward are scaled, so ``step()`` refuses: use
    ``Step(optimizer, clip_grad_norm=...)``, which clips in ``step()``.

    Args:
        max_norm: a positive number.
        norm_type: which norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: raise in ``backward`` if the norm is infinite or NaN; on the CPU only, since the host would
            have to wait for an accelerator.

    Issues: nothing; after a reduce-scatter, one all-reduce of a number. Changes: ``bucket.buffer``.

    Raises:
        ConfigurationError: an argument is out of range; or, at registration, it stands after an update, or before a
            communication hook.
        UnsupportedError: at registration, ``error_if_nonfinite`` on an accelerator.
        TrainingLoopError: in ``backward``, the norm is not finite, with ``error_if_nonfinite``.

    >>> ClipGradNorm(1.0)
    ClipGradNorm(1)
    """

    def __init__(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> None:
        super().__init__()
        self.clipping = Clipping(max_norm, norm_type, argument="max_norm")
        self.error_if_nonfinite = check_flag("error_if_nonfinite", error_if_nonfinite)
        self._norm: Tensor | None = None

    @property
    def norm(self) -> Tensor | None:
        """The norm before clipping of the last pass, a 0-dimensional tensor on the model's device; ``None`` before it.

        Reading it does not make the host wait for an accelerator; printing it does.
        """
        return None if self._norm is None else hold(self._norm)

    @property
    def needs_mean(self) -> bool:
        return True

    @property
    def commutes_with_scaling(self) -> bool:
        return False

    def attach(self, context: StageContext) -> None:
        self.refuse_parameters()
        if self.error_if_nonfinite and has_streams(context.device):
            raise UnsupportedError(
                f"error_if_nonfinite=True of {self!r} would stop the host at every step on {context.device.type}: "
                "leave it out, and look at .norm of the stage now and then"
            )
        super().attach(context)

    async def act(self, buckets: Sequence[Bucket]) -> None:
        gradients = [gradient for _, gradient in self.in_order(buckets)]
        if all(bucket.owned is None for bucket in buckets):
            total = self.clipping.total(gradients, norms(gradients, self.clipping.norm_type))
            self._check(total)
            self.clipping.scale_to_(gradients, total)
        else:
            counted = [part for bucket in buckets for part in self.counted(bucket)]
            everything = [parameter for bucket in buckets for parameter in bucket.parameters]
            sharded = ShardedNorm(self.clipping, counted, everything, buckets[0].buffer.device)
            await all_reduce(sharded.partial, op=sharded.op, group=buckets[0].group)
            total = sharded.total
            self._check(total)
            self.clipping.scale_to_([gradient for gradient in gradients if gradient.numel()], total)
        self._norm = total

    def _check(self, total: Tensor) -> None:
        if self.error_if_nonfinite and not bool(torch.isfinite(total)):
            raise TrainingLoopError(
                f"the norm of order {self.clipping.norm_type:g} of the {self.place.value} is {float(total)}, so they "
                f"cannot be clipped: to go on all the same leave error_if_nonfinite out of {self!r}"
            )

    def __repr__(self) -> str:
        parts = [f"{self.clipping.max_norm:g}"]
        if self.clipping.norm_type != 2:
            parts.append(f"norm_type={self.clipping.norm_type:g}")
        if self.error_if_nonfinite:
            parts.append("error_if_nonfinite=True")
        return f"ClipGradNorm({', '.join(parts)})"
