"""The mean of the gradients, sent in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, RegistrationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.context import StageContext
from overlap.hooks.cut import SavedCut
from overlap.hooks.quantize.exchange import QuantizedSum
from overlap.hooks.quantize.redistribution import redistribute
from overlap.hooks.stage import Stage
from overlap.hooks.wires import ErrorFeedback, Int4, Int8, Wire
from overlap.hooks.wires.feedback import check_shape

__all__ = ["Quantize"]

_KEYS = {"error", "generator", "buckets", "rank", "ranks"}


class Quantize(Stage):
    """The mean of the gradients over ranks, sent as integers of 8 or 4 bits: 0.254 or 0.129 of an fp32 all-reduce.

    Gradients are cut into chunks that have one scale each. A rank sends each other rank that rank's part, quantized,
    sums in fp32 what it receives for its own part, and the quantized sums are gathered. The traffic does not grow with
    the number of ranks, and the result is the same on all ranks bit for bit. The error of a gradient is at most half a
    step (``peak / 127`` in 8 bits, ``peak / 7`` in 4) of its chunk on each rank plus half a step of the sum's chunk;
    with stochastic rounding, whole steps. If a chunk holds a value that is not finite, no value of the result's chunk
    is finite, so that ``GradScaler`` sees it. With one rank nothing is rounded. Sums are taken in fp32 and rounded once
    to the gradients' dtype.

    Args:
        bits: 8 or 4.
        chunk: how many values share a scale at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.
        error_feedback: whether to add what a step left out to the next step's gradients; takes one fp32 copy of the
            gradients, and in backward two. A pass with a result that is not finite, or that fails, changes it on no
            rank. Needs :func:`overlap.register` or :meth:`Chain.register`, which know the parameters' names.

    Issues: a send and a receive with every other rank, then an all-gather, both of ``N/W`` integers and their scales.
    Changes: ``bucket.buffer``. Memory: the bucket's messages; an fp32 copy of a bucket of another dtype.

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
        if bits not in (4, 8):
            raise ConfigurationError(f"bits is {bits!r}: give 4 or 8")
        self.wire: Wire = (Int8 if bits == 8 else Int4)(chunk=chunk, rounding=rounding)
        self.bits = bits
        self.chunk = chunk
        self.rounding = rounding
        self.error_feedback = error_feedback
        self._feedback = ErrorFeedback() if error_feedback else None
        self._generator: torch.Generator | None = None
        self._generator_state: Tensor | None = None
        self._saved_by: tuple[int, int] | None = None
        self._context: StageContext | None = None
        self._cut = SavedCut()

    def attach(self, context: StageContext) -> None:
        if self._feedback is not None and self._context is not None:
            raise RegistrationError(
                f"{self!r} remembers one model's errors already; give each model a stage of its own"
            )
        self._check(context, self._saved_by, {} if self._feedback is None else self._feedback.errors)
        self._context = context
        self._cut.attach(context.cut)

    def detach(self) -> None:
        self._context = None
        self._cut.detach()

    def before_backward(self, *, is_replay: bool) -> None:
        if self._feedback is not None:
            self._feedback.begin()

    def note_result(self, result: Tensor) -> None:
        if self._feedback is not None:
            self._feedback.note(result)

    def after_backward(self, *, failed: bool) -> str | None:
        if self._feedback is not None:
            self._feedback.settle(failed=failed)
        return None

    async def __call__(self, bucket: Bucket) -> None:
        if not bucket.buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {bucket.buffer.dtype} gradients; use AllReduce()")
        if bucket.buffer.numel() == 0:
            return
        # As in DDP, each rank divides before the sum.
        mean = bucket.buffer.float().mul_(1 / bucket.divisor)
        if self._feedback is None:
            await self._sum(bucket, mean, out=mean)
            bucket.buffer.copy_(mean)
            return
        own = bucket.with_buffer(mean.clone())
        self._feedback.add_to(own.names, own.gradients)
        await self._sum(bucket, own.buffer, out=mean)
        bucket.buffer.copy_(mean)
        if bucket.buffer.dtype.itemsize < mean.dtype.itemsize:
            # What rounding the mean loses is not delivered either; each rank keeps its part of it.
            own.buffer.add_(mean.sub_(bucket.buffer), alpha=1 / bucket.group.size())
        self._feedback.hold(own.names, own.gradients, bucket.buffer)

    async def _sum(self, bucket: Bucket, values: Tensor, *, out: Tensor) -> None:
        """Sum ``values`` over ranks into ``out``, and leave in ``values`` the errors, if it is another tensor."""
        if bucket.group.size() > 1:
            exchange = QuantizedSum.of(
                values.numel(), wire=self.wire, generator=self._generator_of(bucket), group=bucket.group
            )
            await exchange(values, out=out)
        elif out is not values:
            out.copy_(values)
            values.zero_()

    def _generator_of(self, bucket: Bucket) -> torch.Generator | None:
        """Not the global one, which the model's dropout uses."""
        if self.wire.is_stochastic and self._generator is None:
            self._generator = torch.Generator(bucket.buffer.device).manual_seed(bucket.group.rank())
            if self._generator_state is not None:
                self._generator.set_state(self._generator_state)
        return self._generator

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of this rank's own state; empty before the first pass.

        ``error`` by parameter's name, the rounding's ``generator``, the ``buckets`` of the last pass, in which a run
        that resumes reduces its first one, and the ``rank`` and number of ``ranks`` that it belongs to.
        """
        state: dict[str, Any] = {}
        if self._feedback is not None:
            state["error"] = self._feedback.state_dict()
        generator = self._generator_state if self._generator is None else self._generator.get_state()
        if generator is not None:
            state["generator"] = generator
        if (buckets := self._cut.state()) is not None:
            state["buckets"] = buckets
        saved_by = self._saved_by if self._context is None else _place(self._context)
        if state and saved_by is not None:
            state["rank"], state["ranks"] = saved_by
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, before or after registering.

        Raises:
            ConfigurationError: ``state_dict`` has unknown keys, has errors and this stage has no error feedback, or is
                another model's or another rank's; for another number of ranks, see :meth:`redistribute`. If the stage
                is not yet registered, registering raises the latter.
        """
        if unknown := sorted(set(state_dict) - _KEYS):
            raise ConfigurationError(f"{self!r} has no state {unknown}")
        errors = state_dict.get("error", {})
        if self._feedback is None and errors:
            raise ConfigurationError(
                f"the state has error feedback, but {self!r} has none: make it with error_feedback=True"
            )
        saved_by = (state_dict["rank"], state_dict["ranks"]) if {"rank", "ranks"} <= set(state_dict) else None
        if self._context is not None:
            self._check(self._context, saved_by, errors)
        self._saved_by = saved_by
        if self._feedback is not None:
            self._feedback.load_state_dict(errors)
        self._generator_state = state_dict.get("generator")
        self._generator = None
        self._cut.load(state_dict.get("buckets"))

    redistribute = staticmethod(redistribute)

    def _check(self, context: StageContext, saved_by: tuple[int, int] | None, errors: Mapping[str, Tensor]) -> None:
        """Raises: ConfigurationError: what was loaded is another rank's or another model's."""
        here = _place(context)
        is_own = self._feedback is not None or self.rounding == "stochastic"
        if saved_by is not None and saved_by != here and is_own:
            raise ConfigurationError(
                f"the state was saved by rank {saved_by[0]} of {saved_by[1]}, but this is rank {here[0]} of {here[1]}, "
                f"and each rank has its own errors: load this rank's file, or make its state with "
                f"Quantize.redistribute(states, rank={here[0]}, ranks={here[1]})"
            )
        if context.names is None:
            return
        parameters = {name: parameter for parameter, name in context.names.items()}
        if foreign := sorted(set(errors) - set(parameters)):
            raise ConfigurationError(
                f"the state has the error feedback of parameters that the model does not have "
                f"({', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}): it is the state of another model"
            )
        for name, error in errors.items():
            check_shape(name, error, parameters[name])

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


def _place(context: StageContext) -> tuple[int, int]:
    return context.group.rank(), context.group.size()
