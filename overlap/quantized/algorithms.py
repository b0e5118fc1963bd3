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
from overlap.hooks.collectives import Operation, all_gather, all_reduce, send_recv
from overlap.hooks.wires import RoundingGenerator
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
        received, overflowed = await self._exchanged(inputs, [output.numel() for output in outputs])
        own = self.group.rank()
        message, _ = self._encoded(_flat(inputs[own]))
        received[own] = self.form.read(message, inputs[own].numel())
        for values, output in zip(received, outputs, strict=True):
            self._land(values, output)
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
        padded = torch.nn.functional.pad(flat, (0, part_numel * ranks - flat.numel()))
        total, reduce_overflowed = await self._reduced(padded.view(ranks, part_numel).unbind(), op)
        parts, gather_overflowed = await self._gathered(total)
        self._land(torch.cat(parts)[: flat.numel()].to(tensor.dtype), tensor)
        return reduce_overflowed or gather_overflowed

    async def _gathered(self, values: Tensor) -> tuple[list[Tensor], bool]:
        """The ``values`` of each rank, by rank, as they were sent."""
        message, flag = self._encoded(values)
        overflowed = await self._agreed(flag)
        gathered = _empty(self.group.size() * message.numel(), message)
        await all_gather(gathered, message, group=self.group)
        messages = gathered.view(self.group.size(), message.numel())
        return [self.form.read(one, values.numel()) for one in messages], overflowed

    async def _reduced(self, inputs: Sequence[Tensor], op: Any) -> tuple[Tensor, bool]:
        """The reduction of what ranks have for this one; this rank's own is not rounded."""
        ranks, rank = self.group.size(), self.group.rank()
        wide = torch.float64 if inputs[rank].dtype == torch.float64 else torch.float32
        received, overflowed = await self._exchanged(inputs, [inputs[rank].numel()] * ranks)
        received[rank] = _flat(inputs[rank])
        total = received[0].to(wide, copy=True)
        # In ranks' order, whatever the rank.
        for values in received[1:]:
            REDUCTIONS[op](total, values.to(wide))
        return total.div_(ranks) if op == dist.ReduceOp.AVG else total, overflowed

    async def _exchanged(self, inputs: Sequence[Tensor], numels: Sequence[int]) -> tuple[list[Tensor], bool]:
        """``inputs`` to the other ranks, and what came from them; nothing yet in this rank's place."""
        ranks, rank = self.group.size(), self.group.rank()
        encoded = [self._encoded(_flat(values)) for values in inputs]
        overflowed = await self._agreed(torch.stack([flag for _, flag in encoded]).any())
        received = [_empty(self.form.message_bytes(numel), encoded[0][0]) for numel in numels]
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        await send_recv(
            [(encoded[peer][0], peer) for peer in peers if encoded[peer][0].numel()],
            [(received[peer], peer) for peer in peers if received[peer].numel()],
            group=self.group,
        )
        nothing = inputs[rank].new_empty(0)
        values = [
            nothing if peer == rank else self.form.read(message, numel)
            for peer, (message, numel) in enumerate(zip(received, numels, strict=True))
        ]
        return values, overflowed

    def _encoded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        rounding = self.roundings.setdefault(values.device, RoundingGenerator(self.form.wire))
        return self.form.encode(values, rounding.of(self.group.rank(), values.device))

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
