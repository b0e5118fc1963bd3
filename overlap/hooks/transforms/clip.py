"""Clipping by the global norm: one implementation, for the transform and for ``zero.clip_grad_norm_``.

[Note: the order of a norm]

A global norm is a sum, and its last bit depends on the order of the summands. A loop that calls
``clip_grad_norm_(ddp.parameters(), c)`` sums in the order of the model's parameters, whatever the optimizer's groups.
So whole gradients are clipped by PyTorch's own functions in that order, with the same bits. Where each rank has a part
of the gradients, powers of the parts are summed in float64, first on each rank, then over ranks: the norm is the same
up to the order of summation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import as_number, check_flag, short_repr
from overlap._torch.device import hold
from overlap._torch.foreach import norms
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.stage import Role, StageContext
from overlap.hooks.transforms.transform import WholePassTransform


@dataclass(frozen=True)
class Clipping:
    """Scale gradients so that their global norm is at most ``max_norm``."""

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_norm", self.max_norm), ("norm_type", self.norm_type)):
            if not (as_number(value) or 0) > 0:  # False for NaN, too.
                raise ConfigurationError(f"{name} must be a positive number, or float('inf'), got {short_repr(value)}")
        check_flag("error_if_nonfinite", self.error_if_nonfinite)

    def clip_(self, gradients: Sequence[Tensor], *, foreach: bool | None = None) -> Tensor:
        """Clip whole gradients in place, as ``torch.nn.utils.clip_grad_norm_`` clips those of parameters in this order.

        Returns: their global norm before, a 0-dimensional tensor.

        Raises: TrainingLoopError: the norm is not finite, with ``error_if_nonfinite``.
        """
        total = torch.nn.utils.get_total_norm(gradients, self.norm_type, foreach=foreach)
        self.scale_(gradients, total, foreach=foreach)
        return total

    def scale_(self, gradients: Sequence[Tensor], total: Tensor, *, foreach: bool | None = None) -> None:
        """Clip ``gradients``, or parts of them, in place, given the global norm of all. Raises: as :meth:`clip_`."""
        if self.error_if_nonfinite and not bool(torch.isfinite(total)):
            raise TrainingLoopError(
                f"the norm of order {self.norm_type:g} of the gradients is {float(total)}, so they cannot be clipped: "
                "to clip them all the same leave out error_if_nonfinite=True"
            )
        holders = [SimpleNamespace(grad=gradient) for gradient in gradients]
        torch.nn.utils.clip_grads_with_norm_(holders, self.max_norm, total, foreach)  # type: ignore[arg-type]

    # Where each rank has a part of the gradients: all-reduce ``partial`` with ``op``, and then scale by ``total``.

    def partial(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """The part of this rank in the global norm, a 0-dimensional tensor."""
        parts = [part for part in parts if part.numel()]  # An empty one has no maximum.
        each = torch.stack(norms(parts, self.norm_type)).double() if parts else torch.zeros(1, device=device).double()
        return each.max() if self.norm_type == float("inf") else each.pow(self.norm_type).sum()

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.MAX if self.norm_type == float("inf") else dist.ReduceOp.SUM

    def total(self, reduced: Tensor, parameters: Iterable[Tensor]) -> Tensor:
        """The global norm, in the promoted dtype of all ``parameters`` of the model, as PyTorch's function gives it."""
        dtypes = {parameter.dtype for parameter in parameters}
        dtype = functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else torch.float32
        return (reduced if self.norm_type == float("inf") else reduced.pow(1 / self.norm_type)).to(dtype)


def in_model_order(parameters: Iterable[Tensor], *models: Iterable[Tensor]) -> list[Tensor]:
    """``parameters`` in the order of the ``models``' parameters; those of no model last, in the order given."""
    given, known = dict.fromkeys(parameters), dict.fromkeys(itertools.chain.from_iterable(models))
    return [one for one in known if one in given] + [one for one in given if one not in known]


class ClipGradNorm(WholePassTransform):
    """Scales the gradients of the whole model so that their norm is at most ``max_norm``.

    After the reducer this is ``torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)`` between backward and
    ``step()``, bit for bit; before it, each rank clips its own gradient by its own norm. It waits for all buckets, so
    updates after it run when backward has computed everything. The norm is the same up to the order of summation after
    a reduce-scatter, with parameters that no rank used, whose zeros are counted, and in a hook registered with
    ``ddp.register_comm_hook``, which does not know the model's order.

    With ``GradScaler`` gradients in backward are scaled, so ``step()`` refuses: clip in the loop, as with plain DDP,
    after ``scaler.unscale_(optimizer)`` and before ``scaler.step(optimizer)`` of an update with ``deferred=True``.

    Args:
        max_norm: a positive number.
        norm_type: order of the norm; ``float("inf")`` for the largest element.

    Communication: none; after a reduce-scatter, one all-reduce of a number. Changes: ``bucket.buffer``.

    Raises:
        ConfigurationError: an argument is out of range; or, at registration, it stands after an update.

    >>> ClipGradNorm(1.0)
    ClipGradNorm(1)
    """

    needs_mean = True
    commutes_with_scaling = False

    def __init__(self, max_norm: float, norm_type: float = 2.0) -> None:
        super().__init__()
        self.clipping = Clipping(max_norm, norm_type)
        self._norm: Tensor | None = None
        # Of a pass in which each rank has parts: its part in the norm, the parameters, its parts.
        self._parts: tuple[Tensor, Iterable[Tensor], Sequence[Tensor]] | None = None

    @property
    def norm(self) -> Tensor | None:
        """The norm before clipping of the last pass, a 0-dimensional tensor on the model's device; ``None`` before it.

        Reading it does not make the host wait for an accelerator; printing it does.
        """
        return None if self._norm is None else hold(self._norm)

    def attach(self, context: StageContext) -> None:
        if self.place is Role.UPDATE:
            raise ConfigurationError(
                f"{self!r} acts on gradients, and stands after an update: put it before the update; a function of a "
                "bucket can change bucket.parameters there"
            )
        super().attach(context)

    def before_backward(self, *, is_replay: bool) -> None:
        super().before_backward(is_replay=is_replay)
        self._parts = None

    def act(self, buckets: Sequence[Bucket]) -> Operation | None:
        assert self.context is not None, "a stage is attached before its first pass"
        seen: dict[Tensor, Tensor] = {}
        for bucket in buckets:
            seen.update(zip(bucket.parameters, self.inputs(bucket), strict=True))
        gradients = [seen[parameter] for parameter in in_model_order(seen, self.context.names or ())]
        if all(bucket.owned is None for bucket in buckets):
            self._norm = self.clipping.clip_(gradients)
            return None
        counted = [part for bucket in buckets for part in self.rank_unique_inputs(bucket)]
        partial = self.clipping.partial(counted, buckets[0].buffer.device)
        self._parts = partial, seen, [gradient for gradient in gradients if gradient.numel()]
        return all_reduce(partial, op=self.clipping.op, group=buckets[0].group)

    def finish(self) -> None:
        if self._parts is not None:
            (partial, seen, gradients), self._parts = self._parts, None
            self._norm = self.clipping.total(partial, seen)
            self.clipping.scale_(gradients, self._norm)

    def __repr__(self) -> str:
        norm_type = self.clipping.norm_type
        return f"ClipGradNorm({self.clipping.max_norm:g}{'' if norm_type == 2 else f', norm_type={norm_type:g}'})"
