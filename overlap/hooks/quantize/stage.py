"""The mean of the gradients, sent in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from overlap.errors import ConfigurationError, RegistrationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.quantize.codec import ChunkCodec, Rounding, StochasticRounding, nearest
from overlap.hooks.quantize.exchange import QuantizedSum
from overlap.hooks.quantize.feedback import ErrorFeedback
from overlap.hooks.stage import Stage, StageContext

__all__ = ["Quantize"]


class Quantize(Stage):
    """The mean of the gradients over ranks, sent as integers of 8 or 4 bits: 0.254 or 0.129 of an fp32 all-reduce.

    Gradients are cut into chunks with a scale each. A rank sends every other one its part of them quantized, adds up in
    fp32 what it gets, and the quantized sums are gathered. The traffic does not grow with the number of ranks, and the
    result is equal in every bit on all of them. A gradient is off by half a step, ``peak / 127`` in 8 bits and
    ``peak / 7`` in 4, of its chunk on each rank and half a step of the sum's chunk, or whole steps where rounding is
    stochastic. A chunk with a value that is not finite comes out with none that is, for ``GradScaler`` to see. One
    rank alone rounds nothing.

    Args:
        bits: 8 or 4.
        chunk: how many values share a scale at most, a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"`` with an error whose mean is zero.
        error_feedback: whether to add what a step left out to the next step's gradients; takes one copy of the
            gradients in fp32. Only in :func:`overlap.register` and :meth:`Chain.register`, which know parameters'
            names.

    Issues: a send and a receive with every other rank, then an all-gather, both of ``N/W`` integers and their scales.
    Changes: ``bucket.buffer``. Memory: the bucket's messages; one copy in fp32 of a bucket of another dtype,
    and one with error feedback.

    Raises:
        ConfigurationError: an argument is none of those.
        UnsupportedError: a bucket of complex gradients, in ``backward()``.

    >>> Quantize(bits=4, error_feedback=True)
    Quantize(bits=4, error_feedback=True)
    """

    def __init__(
        self,
        bits: int = 8,
        *,
        chunk: int = 512,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        error_feedback: bool = False,
    ) -> None:
        ChunkCodec.fit(1, bits=bits, chunk=chunk)
        if rounding not in ("nearest", "stochastic"):
            raise ConfigurationError(f"rounding is {rounding!r}: give 'nearest' or 'stochastic'")
        self.bits = bits
        self.chunk = chunk
        self.rounding = rounding
        self._feedback = ErrorFeedback() if error_feedback else None
        self._stochastic: StochasticRounding | None = None
        self._generator_state: Tensor | None = None
        self._is_attached = False

    @property
    def error_feedback(self) -> bool:
        """Whether what a step leaves out is added to the next."""
        return self._feedback is not None

    def attach(self, context: StageContext) -> None:
        if self._feedback is not None and self._is_attached:
            raise RegistrationError(
                f"{self!r} remembers one model's errors already; give each model a stage of its own"
            )
        self._is_attached = True

    def detach(self) -> None:
        self._is_attached = False

    async def __call__(self, bucket: Bucket) -> None:
        if not bucket.buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {bucket.buffer.dtype} gradients; use AllReduce()")
        numel = bucket.buffer.numel()
        if bucket.group.size() == 1 or numel == 0:
            bucket.buffer.mul_(1 / bucket.divisor)
            return
        exchange = QuantizedSum.of(
            numel, bits=self.bits, chunk=self.chunk, rounding=self._rounding(bucket), group=bucket.group
        )
        # As DDP does it, each rank divides before the sum.
        mean = bucket.buffer.float().mul_(1 / bucket.divisor)
        if self._feedback is None:
            await exchange(mean, out=mean)
        else:
            inner = bucket.with_buffer(mean.clone())
            self._feedback.add_to(inner)
            await exchange(inner.buffer, out=mean)
            self._feedback.keep(inner)
        if mean is not bucket.buffer:
            bucket.buffer.copy_(mean)

    def _rounding(self, bucket: Bucket) -> Rounding:
        if self.rounding == "nearest":
            return nearest
        if self._stochastic is None:
            self._stochastic = StochasticRounding(bucket.buffer.device, seed=bucket.group.rank())
            if self._generator_state is not None:
                self._stochastic.generator.set_state(self._generator_state)
        return self._stochastic

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, whose errors are its own: ``error`` by parameter's name, ``generator`` of the rounding."""
        state: dict[str, Any] = {}
        if self._feedback is not None:
            state["error"] = self._feedback.state_dict()
        if self._stochastic is not None:
            state["generator"] = self._stochastic.generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave on this rank.

        Raises:
            ConfigurationError: ``state_dict`` holds errors, and this stage has no error feedback, or something else.
        """
        if unknown := sorted(set(state_dict) - {"error", "generator"}):
            raise ConfigurationError(f"{self!r} has no state {unknown}")
        if self._feedback is None and state_dict.get("error"):
            raise ConfigurationError(f"a state with errors for {self!r}: make it with error_feedback=True")
        if self._feedback is not None:
            self._feedback.load_state_dict(state_dict.get("error", {}))
        self._generator_state = state_dict.get("generator")
        self._stochastic = None

    @property
    def signature(self) -> str:
        return f"Quantize({self.bits}, {self.chunk}, {self.rounding}, {self.error_feedback})"

    def __repr__(self) -> str:
        options = [f"bits={self.bits}"]
        if self.chunk != 512:
            options.append(f"chunk={self.chunk}")
        if self.rounding != "nearest":
            options.append(f"rounding={self.rounding!r}")
        if self.error_feedback:
            options.append("error_feedback=True")
        return f"Quantize({', '.join(options)})"
