"""Sums over ranks through a wire: over all ranks alike, or exactly within groups and through the wire between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap.hooks import all_gather, reduce_scatter
from overlap.hooks.segments import round_up, segment_multiple
from overlap.hooks.wires import QuantizedSum, Wire

__all__ = ["Ranks", "wired_sum"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a sum."""

    whole: dist.ProcessGroup
    within: dist.ProcessGroup | None = None
    """This rank's group, in which sums are exact, such as the ranks on one machine; ``None`` where each is alone."""
    between: dist.ProcessGroup | None = None
    """The ranks of the other groups at this rank's place, with which it exchanges messages through the wire."""


async def wired_sum(
    values: Tensor, *, out: Tensor, ranks: Ranks, wire: Wire, generator: torch.Generator | None
) -> None:
    """Write the sum of ``values`` over ranks to ``out``, the same on all ranks bit for bit.

    Args:
        values: this rank's summand, fp32 of shape ``(numel,)``; overwritten with the rounding errors that this rank
            made, whose sum over ranks is the error of the result.
        out: another tensor of the same shape.
        ranks: over which ranks.
        wire: how values travel.
        generator: rounds stochastically.

    Issues: a send and a receive of ``1/W`` of the values with every other rank and an all-gather of as much, through
    the wire. With groups: a reduce-scatter within the group in fp32, the same of this rank's part between groups, and
    an all-gather within the group in fp32.
    """
    if ranks.within is None or ranks.between is None:
        sum_over = QuantizedSum.of(values.numel(), wire=wire, generator=generator, group=ranks.whole)
        await sum_over(values, out=out)
        return
    size, place = ranks.within.size(), ranks.within.rank()
    part_numel = round_up(math.ceil(values.numel() / size), segment_multiple(values.device))
    padded = pad(values, (0, part_numel * size - values.numel()))
    part = torch.empty(part_numel, dtype=values.dtype, device=values.device)
    await reduce_scatter(part, padded, group=ranks.within)
    total = torch.empty_like(part)
    sum_between = QuantizedSum.of(part_numel, wire=wire, generator=generator, group=ranks.between)
    await sum_between(part, out=total)
    await all_gather(padded, total, group=ranks.within)
    out.copy_(padded[: values.numel()])
    own = slice(place * part_numel, min((place + 1) * part_numel, values.numel()))
    values.zero_()
    values[own].copy_(part[: values[own].numel()])
