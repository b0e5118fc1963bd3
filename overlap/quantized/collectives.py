"""Collectives that exchange messages of a wire, as coroutines, and the work that they are for the caller.

Sums are taken in fp32 of the values that were sent. A rank's own values take part unrounded, except in an all-to-all
and an all-gather, whose results are the same on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import future_for
from overlap.hooks.collectives import Operation, all_gather
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.wires import RoundingGenerator, Wire
from overlap.hooks.wires.exchange import QuantizedSum, sum_in_order, swap

__all__ = ["Collective", "Exchange", "QuantizedWork"]

Collective = Coroutine[Operation, Any, None]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One call of a collective."""

    group: dist.ProcessGroup
    wire: Wire
    rounding: RoundingGenerator
    loss: float | None
    """Results are divided by it."""
    saturated: list[Tensor] = field(default_factory=list)
    """Whether values were saturated, a ``bool`` of shape ``()`` for each encoding."""

    async def all_gather(self, outputs: Sequence[Tensor], input: Tensor) -> None:
        """Each rank's ``input`` into ``outputs``, by rank."""
        (message,) = self._messages([input])
        gathered = message.new_empty(self.group.size(), message.numel())
        await all_gather(gathered.view(-1), message, group=self.group)
        for row, output in zip(gathered, outputs, strict=True):
            self._read(row, output)

    async def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """``inputs[r]`` of this rank into ``outputs[this rank]`` of rank ``r``."""
        messages = self._messages(inputs)
        received = [messages[0].new_empty(self._message_bytes(output.numel())) for output in outputs]
        received[self.group.rank()] = messages[self.group.rank()]
        await swap(messages, received, group=self.group)
        for message, output in zip(received, outputs, strict=True):
            self._read(message, output)

    async def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Any) -> None:
        """The sum or mean over ranks of their ``inputs[r]`` into ``output`` of rank ``r``."""
        if not output.numel():
            return
        rank, codec = self.group.rank(), self.wire.codec(output.numel())
        own = inputs[rank].detach().reshape(-1).to(torch.float32, copy=True)
        messages = self._messages(inputs)
        received = messages[rank].new_empty(self.group.size(), codec.message_bytes)
        await swap(messages, received, group=self.group)
        self._write(sum_in_order(codec, own, received, rank), output, op)

    async def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """The sum or mean over ranks of ``tensor``, in place."""
        if not tensor.numel():
            return
        total = self._fitting(tensor.detach().reshape(-1)).to(torch.float32, copy=True)
        generator = self.rounding.of(self.group.rank(), tensor.device)
        summed = QuantizedSum.of(total.numel(), wire=self.wire, generator=generator, group=self.group)
        await summed(total, out=total)
        self._write(total, tensor, op)

    def _messages(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A message for each tensor; if all have one length, by a fixed number of operators."""
        numels = {tensor.numel() for tensor in tensors}
        if len(numels) > 1:
            return [self._messages([tensor])[0] for tensor in tensors]
        (numel,) = numels
        device = tensors[0].device
        messages = torch.empty(len(tensors), self._message_bytes(numel), dtype=torch.uint8, device=device)
        if numel:
            rows = self._fitting(torch.stack([tensor.detach().reshape(-1) for tensor in tensors]))
            generator = self.rounding.of(self.group.rank(), device)
            self.wire.codec(numel).encode_rows(rows.float(), messages, generator)
        return list(messages)

    def _message_bytes(self, numel: int) -> int:
        return self.wire.codec(numel).message_bytes if numel else 0

    def _fitting(self, values: Tensor) -> Tensor:
        """``values`` without finite ones that the wire does not hold; infinities stay."""
        largest = self.wire.largest
        if largest >= torch.finfo(values.dtype).max:
            return values
        # Half precision does not hold the largest number of every wire.
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        fitting = torch.where(wide.isinf(), wide, wide.clamp(-largest, largest))
        self.saturated.append(((fitting != wide) & ~wide.isnan()).any())
        return fitting

    def _read(self, message: Tensor, output: Tensor) -> None:
        if output.numel():
            values = torch.empty(1, output.numel(), dtype=torch.float32, device=output.device)
            self.wire.codec(output.numel()).decode_rows(message[None], values)
            self._write(values, output)

    def _write(self, values: Tensor, output: Tensor, op: Any = None) -> None:
        if op == dist.ReduceOp.AVG:
            values = values / self.group.size()
        if self.loss is not None:
            values = values / self.loss
        output.detach().copy_(values.view(output.shape))


class QuantizedWork:
    """A collective in progress, as ``async_op=True`` returns it. On CPU tensors it is done.

    On CUDA tensors the calls on a group run on one side stream, in their order.

    Args:
        collective: is run here.
        exchange: the call that it is of.
        outputs: the tensors that it fills.
        name: of the collective, for warnings.
        used: tensors that must keep their memory until it is done; a caller may drop them at once.

    Raises:
        CollectiveError: a rank is lost.
    """

    def __init__(
        self, collective: Collective, exchange: Exchange, outputs: Sequence[Tensor], name: str, used: object
    ) -> None:
        device = outputs[0].device
        self._name, self._saturated = name, exchange.saturated
        self._used = used
        self._future: torch.futures.Future[list[Tensor]] = future_for(device)
        executor = executor_for(exchange.group, device)
        executor.begin()
        with executor.scope(), torch.no_grad():
            _drive(collective, executor)
            self._future.set_result(list(outputs))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there; on CUDA, when the current stream will wait for them.

        Warns:
            RuntimeWarning: this rank saturated a value; to find that out, the host waits for a CUDA device.
        """
        self._future.wait()
        self._used = ()
        saturated, self._saturated = self._saturated, []
        if any(bool(flag) for flag in saturated):
            message = f"{self._name}: values too large for the type that is sent were saturated"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return True

    def is_completed(self) -> bool:
        """Whether it has been issued: a collective that fails raises where it is called."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the output tensors."""
        return self._future


def _drive(collective: Collective, executor: Any) -> None:
    try:
        value = None
        while True:
            operation = collective.send(value)
            executor.launch(operation)
            value = operation.finish(executor.wait)
    except StopIteration:
        return
    finally:
        collective.close()
