"""Averages through a wire.

What travels is what has changed since a beginning that all ranks had in common, the anchor::

    mean = anchor + mean over ranks of decoded (change + what earlier rounds left out)

The mean is the same on all ranks, bit for bit, and is the next round's anchor. A wire rounds relative to the largest
values of a chunk, and changes are much smaller than parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap._checks import described, told
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import StageContext
from overlap.hooks.engine.background import Item, run_and_wait, run_now
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.wires import ErrorFeedback, RoundingGenerator, Wire
from overlap.hooks.wires.feedback import check_errors
from overlap.optim.local_sgd.average import Packed, Weight, pack_named
from overlap.optim.local_sgd.wired_sum import Ranks, wired_sum

__all__ = ["CompressedMean", "check_real", "check_wire"]


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
        self._feedback = ErrorFeedback() if error_feedback else None
        self._generator = RoundingGenerator(wire)

    @torch.no_grad()
    def average(
        self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor] | None, ranks: Ranks, weight: Weight, *,
        context: StageContext | None = None,
    ) -> None:  # fmt: skip
        """Replace ``tensors`` by their means, in place; returns when the current stream may use them.

        Where ``anchors`` is ``None``, what travels is the tensors themselves. On the connections of ``context``, where
        it is given, and otherwise on the process groups themselves.

        Issues, for about each 8 MB: the collectives of :func:`wired_sum`. A tensor is not cut; two packs are in flight.
        """
        by_device: dict[torch.device, list[_Pack]] = {}
        for place, (names, part) in enumerate(pack_named(tensors)):
            by_device.setdefault(part.tensors[0].device, []).append(_Pack(index=place, names=names, part=part))

        async def work(item: _Pack) -> None:
            flat = item.part.load()
            await self.mean(flat, item.names, item.part, anchors, ranks, weight)
            item.part.store(flat)

        self.begin()
        try:
            for device, packs in by_device.items():
                if context is not None and context.background is not None and context.device == device:
                    run_and_wait(context.background, packs, work, device)
                else:
                    run_now(packs, work, executor_for(ranks.whole, device))
        except BaseException:
            self.settle(failed=True)
            raise
        self.settle(failed=False)

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
        if self._feedback is not None:
            self._feedback.add_to(names, views)
        total = torch.empty_like(change)
        generator = self._generator.of(ranks.whole.rank(), flat.device)
        await wired_sum(change, out=total, ranks=ranks, wire=self.wire, generator=generator)
        if self._feedback is not None:
            self._feedback.hold(names, views, total)
        flat.copy_(total if anchor is None else anchor.add_(total))

    def _deliver_rest(self, flat: Tensor, names: Sequence[str], part: Packed) -> None:
        """The mean of one rank is its own value, with what it still has from when there were more."""
        if self._feedback is None or not self._feedback.errors:
            return
        values = part.views(flat)
        self._feedback.add_to(names, values)
        self._feedback.hold(names, [torch.zeros_like(value, dtype=torch.float32) for value in values], flat)

    def begin(self) -> None:
        """A mean begins."""
        if self._feedback is not None:
            self._feedback.begin()

    def settle(self, *, failed: bool) -> None:
        """It is there, or has failed: then, or where it is not finite, the memory stays as it was, on every rank."""
        if self._feedback is not None:
            self._feedback.settle(failed=failed)

    def restart(self) -> None:
        """Forget what was left out."""
        if self._feedback is not None:
            self._feedback.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """``error`` by name and the rounding's ``generator``, those of this rank; empty where there are none."""
        state: dict[str, Any] = {}
        if self._feedback is not None and (errors := self._feedback.state_dict()):
            state["error"] = errors
        if (generator := self._generator.state()) is not None:
            state["generator"] = generator
        return state

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ConfigurationError: it has errors and this has no error feedback, or they are not those of ``tensors``.
        """
        errors = state.get("error", {})
        if errors and self._feedback is None:
            raise ConfigurationError(
                "the state has the error feedback of a wire, which is still to be delivered: give error_feedback=True"
            )
        check_errors(errors, tensors)
        if self._feedback is not None:
            self._feedback.load_state_dict(errors)
        self._generator.load(state.get("generator"))


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
