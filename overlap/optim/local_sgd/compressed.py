"""Averages through a wire.

What travels is what has changed since a beginning that all ranks had in common, the anchor::

    mean = anchor + mean over ranks of decoded (change + what earlier rounds left out)

The mean is the same on all ranks, bit for bit, and is the next round's anchor. A wire rounds relative to the largest
values of a chunk, and changes are much smaller than parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap._checks import described, told
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import StageContext, all_gather, reduce_scatter
from overlap.hooks.engine.background import Item, run_and_wait, run_now
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.segments import round_up, segment_multiple
from overlap.hooks.wires import QuantizedSum, Wire
from overlap.hooks.wires.feedback import WireMemory, check_errors
from overlap.optim.local_sgd.average import Packed, Weight, pack_named

__all__ = ["CompressedMean", "Ranks", "check_real", "check_wire"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a sum."""

    whole: dist.ProcessGroup
    within: dist.ProcessGroup | None = None
    """This rank's group, in which sums are exact, such as the ranks on one machine; ``None`` where each is alone."""
    between: dist.ProcessGroup | None = None
    """The ranks of the other groups at this rank's place, with which it exchanges messages through the wire."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pack(Item):
    names: list[str]
    part: Packed


class CompressedMean:
    """The mean of tensors over ranks, as changes since their anchors.

    Args:
        wire: how changes travel.
        error_feedback: add what one mean left out to the next. Takes an fp32 copy of the tensors.
    """

    def __init__(self, wire: Wire, *, error_feedback: bool) -> None:
        self.wire = wire
        self.memory = WireMemory(error_feedback=error_feedback, wires=[wire])

    @torch.no_grad()
    def average(
        self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor] | None, ranks: Ranks, weight: Weight, *,
        context: StageContext | None = None,
    ) -> None:  # fmt: skip
        """Replace ``tensors`` by their means, in place; returns when the current stream may use them.

        Where ``anchors`` is ``None``, what travels is the tensors themselves. On the connections of ``context``, where
        it is given, and otherwise on the process groups themselves.

        Communication, for about each 8 MB: the collectives of a sum through the wire. A tensor is not cut; two packs
        are in flight.
        """
        by_device: dict[torch.device, list[_Pack]] = {}
        for place, (names, part) in enumerate(pack_named(tensors)):
            by_device.setdefault(part.tensors[0].device, []).append(_Pack(index=place, names=names, part=part))

        async def work(item: _Pack) -> None:
            flat = item.part.load()
            await self.mean(flat, item.names, item.part, anchors, ranks, weight)
            item.part.store(flat)

        self.memory.begin()
        try:
            for device, packs in by_device.items():
                if context is not None and context.background is not None and context.device == device:
                    run_and_wait(context.background, packs, work, device)
                else:
                    run_now(packs, work, executor_for(ranks.whole, device))
        except BaseException:
            self.memory.settle(failed=True)
            raise
        self.memory.settle(failed=False)

    async def mean(
        self, flat: Tensor, names: Sequence[str], part: Packed, anchors: Mapping[str, Tensor] | None, ranks: Ranks,
        weight: Weight,
    ) -> None:  # fmt: skip
        """Replace ``flat``, this rank's values of the tensors ``names`` as ``part`` packs them, by their mean."""
        if ranks.whole.size() == 1:
            self._deliver_rest(flat, names, part)
            return
        # Differences of half-precision numbers are taken in fp32.
        wide = torch.promote_types(flat.dtype, torch.float32)
        anchor = None if anchors is None else Packed(tuple(anchors[name] for name in names), wide).load()
        change = flat.to(torch.float32, copy=True) if anchor is None else (flat - anchor).float()
        weight.scale_(change)
        views = part.views(change)
        if (feedback := self.memory.feedback) is not None:
            feedback.add_to(names, views)
        total = torch.empty_like(change)
        generator = self.memory.generator_for(self.wire, ranks.whole.rank(), flat.device)
        await _sum(change, out=total, ranks=ranks, wire=self.wire, generator=generator)
        if feedback is not None:
            feedback.hold(names, views, total)
        flat.copy_(total if anchor is None else anchor.add_(total))

    def _deliver_rest(self, flat: Tensor, names: Sequence[str], part: Packed) -> None:
        """The mean of one rank is its own value, with what it still has from when there were more."""
        feedback = self.memory.feedback
        if feedback is None or not feedback.errors:
            return
        values = part.views(flat)
        feedback.add_to(names, values)
        feedback.hold(names, [torch.zeros_like(value, dtype=torch.float32) for value in values], flat)

    def restart(self) -> None:
        """Forget the errors of earlier means."""
        if self.memory.feedback is not None:
            self.memory.feedback.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """``error`` by name and the rounding's ``generator``, those of this rank; empty where there are none."""
        state = self.memory.state_dict()
        return {key: value for key, value in state.items() if key != "error" or value}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ConfigurationError: it has errors and this has no error feedback, or they are not those of ``tensors``.
        """
        errors = state.get("error", {})
        if errors and self.memory.feedback is None:
            raise ConfigurationError(
                "the state has the error feedback of a wire, which is still to be delivered: give error_feedback=True"
            )
        check_errors(errors, tensors)
        self.memory.load_state_dict(state)


async def _sum(values: Tensor, *, out: Tensor, ranks: Ranks, wire: Wire, generator: torch.Generator | None) -> None:
    """Write the sum of ``values`` over ranks to ``out``, the same on all ranks bit for bit.

    Args:
        values: this rank's summand, fp32 of shape ``(numel,)``; overwritten with the rounding errors that this rank
            made, whose sum over ranks is the error of the result.
        out: another tensor of the same shape.
        ranks: over which ranks.
        wire: how values travel.
        generator: rounds stochastically.

    Communication: a send and a receive of ``1/W`` of the values with every other rank and an all-gather of as much,
    through the wire. With groups: a reduce-scatter within the group in fp32, the same of this rank's part between
    groups, and an all-gather within the group in fp32.
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


def check_wire(
    wire: Wire | None, *, error_feedback: bool = False, dtype: torch.dtype | None = None, dtype_is: str = "dtype"
) -> None:
    """Check how an average is to travel.

    Raises:
        ConfigurationError: ``wire`` is not a wire, there is error feedback and no wire, or sums are to be in a
            ``dtype`` that is wider than the wire's; the message calls it ``dtype_is``.
    """
    if wire is not None and not isinstance(wire, Wire):
        hint = f"{wire.__name__}()" if isinstance(wire, type) else "Int8()"
        raise ConfigurationError(f"wire is {described(wire)}; give a wire such as {hint}, or None for full precision")
    if not isinstance(error_feedback, bool):
        raise ConfigurationError(f"error_feedback is {told(error_feedback)}: give True or False")
    if error_feedback and wire is None:
        raise ConfigurationError(
            "error_feedback=True keeps what a wire leaves out, and there is no wire: give one, as in wire=Int8()"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"{dtype_is} is a floating-point dtype such as torch.float32, got {told(dtype)}")
    if wire is not None and dtype is not None and dtype.itemsize > torch.float32.itemsize:
        raise ConfigurationError(
            f"{dtype_is} is {dtype}, and what a wire carries is summed in torch.float32: leave one of the two out"
        )


def check_real(tensors: Mapping[str, Tensor]) -> None:
    """Raises: UnsupportedError: one of ``tensors`` is complex."""
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise UnsupportedError(
                f"a wire carries real numbers, and {name} is {str(tensor.dtype).removeprefix('torch.')}: leave wire "
                "out, and it is averaged in full precision"
            )
