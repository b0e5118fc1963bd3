"""Whether all ranks have scaled their gradients alike, where each rank has the mean of its own part only.

[Note: one factor]

What clips by a norm of ``.grad`` scales by another number on each rank, and by the wrong one. What unscales, or scales
a layer by a number of the loop, scales alike everywhere; what works element by element (a cut of values, a mask, noise)
is right on the part that is applied. So the ranks compare factors, parameter by parameter: each sends the interval in
which its own lies, as far as rounding lets it be known, and these must have a point in common. A rank abstains where
it cannot tell: the change was not a scaling, or all magnitudes were equal or zero, so that a cut would look the same,
or all became zero, which is right on any part. In half precision one parameter's factor is not known well; that of all
parameters together is, and is compared as one more. On an accelerator nothing waits for the answer: it is read in a
later step, and the error says that the update was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.autograd import version
from overlap._torch.device import has_streams
from overlap.errors import TrainingLoopError
from overlap.hooks.late_reads import LateReads
from overlap.join.group_collectives import all_reduce
from overlap.optim.zero.sharding import Shard, flatten

__all__ = ["ScaleVote"]

# The largest magnitudes of about so many blocks stand for a gradient.
_BLOCKS = 1024


class ScaleVote:
    """Whether the loop has scaled gradients alike on all ranks between backward and ``step()``. See [Note: one factor].

    Mutates no gradient.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        self._magnitudes: dict[int, Tensor] = {}
        self._late: LateReads[Sequence[Shard]] = LateReads()

    @torch.no_grad()
    def note(self, shards: Iterable[Shard]) -> None:
        """These have gradients, as backward or the library's own clipping has left them."""
        present = [shard for shard in shards if shard.parameter.grad is not None]
        self._seen = {id(shard): _seen(shard) for shard in present}
        self._magnitudes = {id(shard): _magnitudes(shard) for shard in present}

    @torch.no_grad()
    def check(self, shards: Sequence[Shard], group: dist.ProcessGroup, device: torch.device) -> None:
        """Compare with the other ranks; ``shards`` are all of the optimizer's, in the same order on every rank.

        Issues: one all-reduce of two numbers per parameter, and two.

        Raises:
            TrainingLoopError: gradients were scaled, on some rank otherwise than on another; on all ranks, but on an
                accelerator in a later step.
        """
        has_changed = any(id(shard) in self._seen and self._seen[id(shard)] != _seen(shard) for shard in shards)
        bounds = self._bounds(shards, device) if has_changed else _unscaled(len(shards) + 1, device)
        all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        if not has_streams(device):
            _refuse_differences(shards, bounds, is_late=False)
            return
        self._late.send(shards, bounds)
        for then, told in self._late.read():
            _refuse_differences(then, told, is_late=True)

    def _bounds(self, shards: Sequence[Shard], device: torch.device) -> Tensor:
        """Between what the factor of each parameter lies, and that of all; shape ``(2, parameters + 1)``, the upper
        bounds negative, so that the largest of all ranks is the narrowest interval."""
        places, before, after, precision = [], [], [], []
        for place, shard in enumerate(shards):
            if id(shard) not in self._magnitudes or shard.parameter.grad is None:
                continue
            then, now = self._magnitudes[id(shard)], _magnitudes(shard)
            eps = max(torch.finfo(then.dtype).eps, torch.finfo(now.dtype).eps)
            step = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in (then.dtype, now.dtype))
            places.append(torch.full((now.numel(),), place, device=device))
            precision.append(torch.stack([torch.full_like(now, one, dtype=torch.float64) for one in (eps, step)]))
            before.append(then.double())
            after.append(now.double())
        abstained = torch.full((2, len(shards) + 1), -torch.inf, dtype=torch.float64, device=device)
        if not places:
            return abstained
        of_all = torch.full((sum(map(len, places)),), len(shards), device=device)
        twice, precisions = torch.cat([*places, of_all]), torch.cat([*precision, *precision], dim=1)
        return _intervals(torch.cat([*before, *before]), torch.cat([*after, *after]), twice, precisions, abstained)


def _refuse_differences(shards: Sequence[Shard], bounds: Tensor, *, is_late: bool) -> None:
    """Raises: TrainingLoopError: the factors of some parameter have nothing in common."""
    names = [*(shard.name for shard in shards), "all parameters"]
    for name, largest, negative in zip(names, *bounds.tolist(), strict=True):
        if (smallest := -negative) < largest:
            when, remedy = ("in an earlier step, after", "load a checkpoint, and use") if is_late else ("after", "use")
            raise TrainingLoopError(
                f"{when} backward .grad of {name} was scaled by {smallest:.6g} on one rank and by {largest:.6g} on "
                "another, as by torch.nn.utils.clip_grad_norm_: each rank has the mean of its own part only; "
                f"{remedy} zero.clip_grad_norm_(max_norm), or ZeroStep(zero, clip_grad_norm=max_norm)"
            )


def _intervals(before: Tensor, after: Tensor, place: Tensor, precisions: Tensor, abstained: Tensor) -> Tensor:
    """The bounds of ``after / before`` for the elements of each place; ``abstained`` where that is not one number.

    ``precisions`` are the elements' relative precision and, next to zero, the absolute one; shape ``(2, elements)``.
    """
    eps, step = precisions
    zeros = abstained.new_zeros(abstained.shape[1])

    def total(values: Tensor) -> Tensor:
        return zeros.index_add(0, place, values)

    def largest(values: Tensor) -> Tensor:
        return zeros.scatter_reduce(0, place, values, "amax")

    squares = total(before.square())
    factor = total(after * before) / squares
    expected = factor[place] * before
    # A few roundings, and those of numbers next to zero, do not make another factor.
    excess = (after - expected).abs() - 4 * eps * expected.abs() - 2 * step
    is_scaled = largest(excess) <= 0
    # If all magnitudes but zeros are equal, the sum of their squares is the largest times the sum.
    is_flat = largest(before) * total(before) <= squares * (1 + 1e-6)
    # Roundings average out over the elements that have a weight in the factor.
    count = squares.square() / total(before.square().square())
    coarsest = largest(eps)
    floor = torch.where(coarsest > 1e-5, 1e-4, 1e-5)
    tolerance = torch.maximum(floor, 6 * coarsest / count.sqrt() + 6 * largest(step) / (factor * squares.sqrt())) / 2
    knows = is_scaled & ~is_flat & (factor > 0) & torch.isfinite(factor) & torch.isfinite(tolerance)
    return torch.where(knows, torch.stack([factor * (1 - tolerance), -factor * (1 + tolerance)]), abstained)


def _unscaled(count: int, device: torch.device) -> Tensor:
    """The bounds of gradients that are as they were."""
    ones = torch.ones(count, dtype=torch.float64, device=device)
    return torch.stack([ones * (1 - 1e-5), -ones * (1 + 1e-5)])


def _magnitudes(shard: Shard) -> Tensor:
    """The largest magnitude in each of some blocks of what this rank has of ``.grad``.

    That is the part that is applied; of small parameters, and of those that have one owner, all of ``.grad``, so that
    every rank has a say.
    """
    grad = shard.parameter.grad
    assert grad is not None, "asked of parameters with a gradient"
    if shard.is_whole or grad.numel() <= 2 * _BLOCKS:
        if grad.is_sparse or grad.stride() != shard.parameter.stride():
            grad = grad.to_dense().contiguous() if grad.is_sparse else grad.contiguous()
        part = flatten(grad)
    else:
        part = shard.gradient()
    length = max(1, part.numel() // _BLOCKS)
    whole = part.numel() - part.numel() % length
    blocks: Tensor = torch.linalg.vector_norm(part[:whole].view(-1, length), float("inf"), dim=1)
    if whole == part.numel():
        return blocks
    return torch.cat([blocks, torch.linalg.vector_norm(part[whole:], float("inf")).view(1)])


def _seen(shard: Shard) -> tuple[int, int]:
    """Which tensor is in ``.grad``, and how often it was changed in place."""
    grad = shard.parameter.grad
    return (0, 0) if grad is None else (id(grad), version(grad))
