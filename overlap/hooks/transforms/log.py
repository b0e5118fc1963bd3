"""Norms by layer, for a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from overlap._checks import type_name
from overlap._torch.device import hold
from overlap._torch.foreach import norms
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.stage import Plan, Role, StageContext
from overlap.hooks.transforms.transform import Transform


class Log(Transform):
    """Reports the norm of every gradient, by parameter name: before the reducer those of this rank's own gradients,
    after it those of the mean; after an update the norms of the new parameters.

    When ``backward`` is over it calls ``to(step, norms)`` on the training thread. ``step`` is that of the buckets, the
    number of synchronized backwards before this one since the chain was registered, the same on all ranks; ``norms``
    maps names to 0-dimensional tensors on the model's device, in the model's order. The host does not wait for an
    accelerator until ``to`` reads a value. A rank that has run out of inputs under ``Join`` takes part and reports
    nothing.

    Args:
        to: a function; it may differ from rank to rank.

    Communication: none; after a reduce-scatter, one all-reduce of eight bytes per parameter and bucket.

    Raises:
        ConfigurationError: ``to`` is not a function; or, at registration, the names of parameters are not known.

    >>> Log(lambda step, norms: print(step, max(norms.values())))
    Log()
    """

    needs_mean = True
    edits_gradients = False

    def __init__(self, to: Callable[[int, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        if not callable(to):
            raise ConfigurationError(
                f"Log takes a function of a step and a dictionary of norms, got {type_name(to)}: "
                "Log(lambda step, norms: ...)"
            )
        self._to = to
        self._step = -1
        self._norms: dict[str, Tensor] = {}

    def attach(self, context: StageContext) -> None:
        if context.names is None:
            raise ConfigurationError(
                f"{self!r} needs the names of the parameters, which ddp.register_comm_hook does not pass on: use "
                "overlap.register"
            )
        super().attach(context)

    def plan(self, bucket: Bucket) -> Plan:
        if self.place is Role.UPDATE or bucket.owned is None:
            seen = self.inputs(bucket)
            return (lambda: self._note(bucket, norms([tensor.detach() for tensor in seen], 2)),)
        parts, squares = self.rank_unique_inputs(bucket), []

        def launch() -> Operation:  # Of the parts, and from them of the whole gradients.
            squares.append(torch.stack(norms(parts, 2)).double().square_())
            return all_reduce(squares[0], group=bucket.group)

        def finish() -> None:
            self._note(bucket, squares.pop().sqrt_().float().unbind())

        return launch, finish

    def _note(self, bucket: Bucket, each: Iterable[Tensor]) -> None:
        if not bucket.is_replay:
            self._step = bucket.step
            self._norms.update(zip(bucket.names, each, strict=True))

    def after_backward(self, *, failed: bool) -> None:
        found, self._norms = self._norms, {}
        if failed or not found:
            return
        assert self.context is not None and self.context.names is not None, "checked at registration"
        self._to(self._step, {name: hold(found[name]) for name in self.context.names.values() if name in found})
