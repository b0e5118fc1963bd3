"""The collectives, as coroutines that await exchanges of bytes; what drives them is in :mod:`overlap.quantized.engine`.

Sums are taken in fp32 (fp64 for fp64), of what was sent. Each coroutine returns whether this rank saturated a value.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.errors import QuantizationOverflowError
from overlap.hooks.collectives import Operation, all_gather, all_reduce
from overlap.hooks.wires import RoundingGenerator
from overlap.hooks.wires.exchange import sum_in_order, swap
from overlap.quantized.formats import Format

__all__ = ["Collective", "Exchange", "REDUCTIONS"]

Collective = Coroutine[Operation, Any, bool]

REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,
    dist.ReduceOp.MAX: lambda total, other: torch.maximum(total, other, out=total),
    dist.ReduceOp.MIN: lambda total, other: torch.minimum(total, other, out=total),
}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One call of a collective."""

    group: dist.ProcessGroup
    form: Format
    roundings: dict[torch.device, RoundingGenerator]
    """Filled as devices are seen; the calls of a function on a group share it."""
    raises: bool
    """Whether an overflow on any rank is an error on all, which they find out by one small all-reduce."""
    loss: float | None
    """What results are divided by."""

    async def all_gather(self, outputs: Sequence[Tensor], input: Tensor) -> bool:
        """Each rank's ``input`` into ``outputs``, by rank."""
        gathered, overflowed = await self._gathered(_flat(input))
        for values, output in zip(gathered, outputs, strict=True):
            self._land(values, output)
        return overflowed

    async def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """``inputs[r]`` of this rank into ``outputs[this rank]`` of rank ``r``."""
        messages, flag = self._encoded([_flat(values) for values in inputs])
        overflowed = await self._agreed(flag)
        numels = [output.numel() for output in outputs]
        received = [_empty(self.form.message_bytes(numel), messages[0]) for numel in numels]
        received[self.group.rank()] = messages[self.group.rank()]
        await swap(messages, received, group=self.group)
        for message, output in zip(received, outputs, strict=True):
            if output.numel():
                self._land(self.form.read(message[None], output.numel())[0], output)
        return overflowed

    async def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Any) -> bool:
        """The reduction over ranks of their ``inputs[r]`` into ``output`` of rank ``r``."""
        total, overflowed = await self._reduced(inputs, op)
        self._land(total, output)
        return overflowed

    async def all_reduce(self, tensor: Tensor, op: Any) -> bool:
        """The reduction over ranks of ``tensor``, in place: each rank reduces a part, and parts are gathered."""
        ranks = self.group.size()
        flat = _flat(tensor)
        part_numel = -(-flat.numel() // ranks)
        missing = part_numel * ranks - flat.numel()
        whole = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        total, reduce_overflowed = await self._reduced(whole.view(ranks, part_numel).unbind(), op)
        parts, gather_overflowed = await self._gathered(total)
        self._land(parts.view(-1)[: flat.numel()].to(tensor.dtype), tensor)
        return reduce_overflowed or gather_overflowed

    async def _gathered(self, values: Tensor) -> tuple[Tensor, bool]:
        """The ``values`` of each rank, as they were sent, a row for each rank."""
        (message,), flag = self._encoded([values])
        overflowed = await self._agreed(flag)
        gathered = _empty(self.group.size() * message.numel(), message)
        await all_gather(gathered, message, group=self.group)
        return self.form.read(gathered.view(self.group.size(), message.numel()), values.numel()), overflowed

    async def _reduced(self, inputs: Sequence[Tensor], op: Any) -> tuple[Tensor, bool]:
        """The reduction of what ranks have for this one, in ranks' order; this rank's own is not rounded."""
        ranks, rank = self.group.size(), self.group.rank()
        own = _flat(inputs[rank])
        # This rank's own is sent nowhere.
        others = [own[:0] if peer == rank else _flat(values) for peer, values in enumerate(inputs)]
        messages, flag = self._encoded(others)
        overflowed = await self._agreed(flag)
        message_bytes = self.form.message_bytes(own.numel())
        received = _empty(ranks * message_bytes, own).view(ranks, message_bytes)
        await swap(messages, received, group=self.group)
        total = self._total(own, received, op)
        return total.div_(ranks) if op == dist.ReduceOp.AVG else total, overflowed

    def _total(self, own: Tensor, received: Tensor, op: Any) -> Tensor:
        """The reduction of ``own`` and what the other ranks' messages hold, a row each, in ranks' order."""
        rank = self.group.rank()
        is_sum = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if is_sum and own.dtype != torch.float64 and own.numel():
            return sum_in_order(self.form.wire.codec(own.numel()), own.to(torch.float32, copy=True), received, rank)
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        total = own.new_empty(0)
        for peer, message in enumerate(received):
            values = (own if peer == rank else self.form.read(message[None], own.numel())[0]).to(wide)
            total = values.clone() if peer == 0 else REDUCTIONS[op](total, values)
        return total

    def _encoded(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        device = tensors[0].device
        rounding = self.roundings.setdefault(device, RoundingGenerator(self.form.wire))
        return self.form.encode(tensors, rounding.of(self.group.rank(), device))

    async def _agreed(self, flag: Tensor) -> bool:
        if self.raises:
            anywhere = flag.float().view(1)
            await all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
            if bool(anywhere):
                here = "this rank" if bool(flag) else "another rank"
                raise QuantizationOverflowError(
                    f"a value on {here} is larger than {self.form.largest:g}, the largest that this type holds; "
                    "scale the tensor, send another type, or give overflow='saturate'"
                )
        return bool(flag)

    def _land(self, values: Tensor, output: Tensor) -> None:
        if self.loss is not None:
            values = values / self.loss
        output.copy_(values.view(output.shape))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _empty(nbytes: int, like: Tensor) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)
