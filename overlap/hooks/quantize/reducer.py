"""The mean of the gradients, sent in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError, RegistrationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.context import StageContext
from overlap.hooks.quantize.codec import ChunkCodec, Rounding, StochasticRounding, nearest
from overlap.hooks.quantize.exchange import QuantizedSum
from overlap.hooks.stage import Stage

__all__ = ["Quantize"]


class Quantize(Stage):
    """The mean of the gradients over ranks, sent as integers of 8 or 4 bits: 0.254 or 0.129 of an fp32 all-reduce.

    Gradients are cut into chunks that have one scale each. A rank sends each other rank that rank's part, quantized,
    sums in fp32 what it receives for its own part, and the quantized sums are gathered. The traffic does not grow with
    the number of ranks, and the result is the same on all ranks bit for bit. The error of a gradient is at most half a
    step (``peak / 127`` in 8 bits, ``peak / 7`` in 4) of its chunk on each rank plus half a step of the sum's chunk;
    with stochastic rounding, whole steps. If a chunk holds a value that is not finite, no value of the result's chunk
    is finite, so that ``GradScaler`` sees it. With one rank nothing is rounded.

    Args:
        bits: 8 or 4.
        chunk: how many values share a scale at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.
        error_feedback: whether to add what a step left out to the next step's gradients; takes one fp32 copy of the
            gradients. Needs :func:`overlap.register` or :meth:`Chain.register`, which know the parameters' names.

    Issues: a send and a receive with every other rank, then an all-gather, both of ``N/W`` integers and their scales.
    Changes: ``bucket.buffer``. Memory: the bucket's messages; an fp32 copy of a bucket of another dtype; one more fp32
    copy with error feedback.

    Raises:
        ConfigurationError: an argument is not one of the above.
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
        self._feedback = _ErrorFeedback() if error_feedback else None
        self._stochastic: StochasticRounding | None = None
        self._generator_state: Tensor | None = None
        self._is_attached = False

    @property
    def error_feedback(self) -> bool:
        """Whether what a step leaves out is added in the next step."""
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
        # As in DDP, each rank divides before the sum.
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
        """This rank's own state: ``error`` by parameter's name, and the rounding's ``generator``."""
        state: dict[str, Any] = {}
        if self._feedback is not None:
            state["error"] = self._feedback.state_dict()
        if self._stochastic is not None:
            state["generator"] = self._stochastic.generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank.

        Raises:
            ConfigurationError: ``state_dict`` has unknown keys, or has errors and this stage has no error feedback.
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


class _ErrorFeedback:
    """What quantization left out, to be added in the next step (Seide et al., 2014; Karimireddy et al., 2019).

    Kept in fp32 by parameter's name, so that it stays valid when DDP rebuilds its buckets.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def add_to(self, bucket: Bucket) -> None:
        """Add to ``bucket``, which is in fp32, what earlier steps left out of it.

        Raises:
            ConfigurationError: a loaded memory does not have the shape of the parameter's gradient.
        """
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            memory = self._memory.get(name)
            if memory is None:
                continue
            if memory.shape != gradient.shape:
                raise ConfigurationError(
                    f"the error feedback of {name} is of shape {tuple(memory.shape)}, its gradient of "
                    f"{tuple(gradient.shape)}: the state that was loaded is another model's"
                )
            if memory.device != gradient.device:
                memory = self._memory[name] = memory.to(gradient.device)
            gradient.add_(memory)

    def keep(self, bucket: Bucket) -> None:
        """Store ``bucket``, in fp32, as what this step left out; where it is not finite, keep the old value."""
        kept = []
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            if name not in self._memory:
                self._memory[name] = torch.zeros_like(gradient)
            memory = self._memory[name]
            kept.append(torch.where(gradient.isfinite(), gradient, memory))
        copy_all([self._memory[name] for name in bucket.names], kept)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: memory.clone() for name, memory in self._memory.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self._memory = {name: memory.to(torch.float32, copy=True) for name, memory in state_dict.items()}
