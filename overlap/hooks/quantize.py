"""The mean of the gradients in fewer bytes: sent through a wire."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from overlap._checks import check_flag, short_repr
from overlap._torch.foreach import largest
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.stage import Plan
from overlap.hooks.wires import Int8, StageMemory, StageWithMemory, Wire, redistribute


class Quantize(StageWithMemory):
    """The mean of the gradients over ranks, sent in fewer bytes; in integers of 4 bits, 0.127 of an fp32 all-reduce.

    A rank sends each other rank that rank's part, encoded, sums in fp32 the messages for its own part, and the encoded
    sums are gathered; they are rounded once to the gradients' dtype. The result is the same on all ranks bit for bit.
    The error of a gradient is at most the wire's on each other rank plus the wire's for the sum; with one rank nothing
    is rounded. If a gradient is not finite, neither are some of the results, so that ``GradScaler`` sees it.

    A job on several machines, by host name, with as many ranks on each, does this between machines, with gradients
    that are summed in fp32 within each. Not where the model's process group lacks ranks of the job.

    Args:
        wire: the format, :class:`Int8` by default.
        error_feedback: whether to add a step's rounding errors to the next step's gradients; takes one fp32 copy of the
            gradients, and from backward to the step two. A step that is not made, or a pass with a result that is not
            finite, changes it on no rank. Needs the parameters' names, which a hook registered with DDP itself does
            not know.

    Communication: a send and a receive with every other rank (on NCCL one all-to-all), then an all-gather, both of
    ``N/W`` encoded values; on several machines these between them, and within each a reduce-scatter and an all-gather
    in fp32. Before the first pass host names are compared, and groups are made. Changes: ``bucket.buffer``. Memory:
    twice the bucket's messages; an fp32 copy of a bucket of another dtype; on an accelerator about another fp32 copy
    while it is encoded or decoded.

    Raises:
        ConfigurationError: ``wire`` is not a wire.
        UnsupportedError: a bucket of complex gradients, in ``backward()``.

    >>> Quantize(Int4(), error_feedback=True)
    Quantize(Int4(), error_feedback=True)
    """

    def __init__(self, wire: Wire | None = None, *, error_feedback: bool = False) -> None:
        if wire is not None and not isinstance(wire, Wire):
            is_class = isinstance(wire, type) and issubclass(wire, Wire)
            remedy = f"give {wire.__name__}()" if is_class else "give one such as Int8(), Int4() or TopK(0.01)"
            raise ConfigurationError(f"the wire is {short_repr(wire)}: {remedy}")
        self.wire = Int8() if wire is None else wire
        self.error_feedback = check_flag("error_feedback", error_feedback)
        self._memory = StageMemory(self, error_feedback=error_feedback, wire=self.wire)

    def plan(self, bucket: Bucket) -> Plan:
        memory, buffer = self._memory, bucket.buffer
        if not buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {buffer.dtype} gradients; use AllReduce()")
        numel, scale, ranks = buffer.numel(), 1 / bucket.divisor, bucket.group.size()
        if numel == 0:
            return ()
        exchange = memory.sum_of(numel, bucket.group, buffer.device)
        own, mean = bucket, buffer  # Of one pass.

        # As in DDP, each rank divides before the sum.
        def start() -> tuple[Tensor, Tensor]:
            nonlocal mean
            mean = buffer.float().mul_(scale)
            return mean, mean

        def finish() -> None:
            nonlocal mean
            if mean is not buffer:
                buffer.copy_(mean)
            mean = buffer

        def start_with_errors() -> tuple[Tensor, Tensor]:
            nonlocal own, mean
            values = pad(buffer.float(), (0, exchange.padded_numel - numel)).mul_(scale)
            own = bucket.with_buffer(values[:numel])
            memory.add_errors(own.names, own.gradients)
            mean = buffer if buffer.dtype == values.dtype else torch.empty_like(own.buffer)
            return values, mean

        def finish_with_errors() -> None:
            nonlocal own
            given = mean
            finish()
            if buffer.dtype.itemsize < given.dtype.itemsize:
                # What rounding the mean loses is not delivered either; each rank keeps its part of it.
                own.buffer.add_(given.sub_(buffer), alpha=1 / ranks)
            memory.put(own.names, own.gradients)
            memory.note_largest(largest(buffer))
            own = bucket

        if self.error_feedback:
            return *exchange.plan(start_with_errors), finish_with_errors
        return *exchange.plan(start), finish

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        return f"Quantize({self.wire!r}{', error_feedback=True' if self.error_feedback else ''})"
