"""Norms by layer, for a log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_whole_number, described
from overlap._torch.device import has_streams, hold, recorded_event, to_host
from overlap._torch.foreach import norms
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.stage import StageContext
from overlap.hooks.transforms.clip import check_norm_type
from overlap.hooks.transforms.transform import Place, Transform

__all__ = ["Log"]

Sink = Callable[[int, dict[str, Tensor]], None]

_logger = logging.getLogger(__name__)


class Log(Transform):
    """Hands out the norm of every gradient, by the name of its parameter: before the reducer those of this rank's own,
    after it those of the mean; after an update the norms of the new parameters.

    When ``backward`` is over it calls ``to(step, norms)`` on the training thread. ``step`` counts the synchronized
    backwards before this one, the same on all ranks, and ``norms`` maps names to 0-dimensional tensors on the model's
    device, in the model's order. The host does not wait for an accelerator until ``to`` reads a value. The default
    writes to the logger ``overlap.hooks.transforms.log``, from an accelerator some steps later. A rank that has run out
    of inputs under ``Join`` takes part and reports nothing.

    Args:
        to: a function; ``None`` for Python's ``logging``, at level ``INFO``. It may differ from rank to rank.
        every: report one of so many backwards.
        norm_type: which norm; ``float("inf")`` for the largest element.

    Communication: none; after a reduce-scatter, one all-reduce of eight bytes per parameter and bucket, in those
    backwards that are reported.

    Raises:
        ConfigurationError: an argument is wrong; or, at registration, the names of parameters are not known.

    >>> Log(lambda step, norms: print(step, max(norms.values())), every=10)
    Log(every=10)
    """

    def __init__(self, to: Sink | None = None, *, every: int = 1, norm_type: float = 2.0) -> None:
        super().__init__()
        if to is not None and not callable(to):
            raise ConfigurationError(
                f"Log takes a function of a step and a dictionary of norms, got {described(to)}: "
                "Log(lambda step, norms: ...)"
            )
        self.every = check_whole_number("every", every, least=1)
        self.norm_type = check_norm_type(norm_type)
        self._to = to
        self._sink: Sink = to or _discarded
        self._norms: dict[str, Tensor] = {}
        self._passes = 0
        self._is_replay = False

    @property
    def needs_mean(self) -> bool:
        return True

    @property
    def edits_gradients(self) -> bool:
        return False

    def attach(self, context: StageContext) -> None:
        if context.names is None:
            raise ConfigurationError(
                f"{self!r} needs the names of the parameters, which a hook registered with ddp.register_comm_hook is "
                "not told: use overlap.register"
            )
        super().attach(context)
        self._sink = self._to or _Logger(self.place.value)

    def detach(self) -> None:
        if isinstance(self._sink, _Logger):
            self._sink.write_late(waits=True)
        super().detach()

    def before_backward(self, *, is_replay: bool) -> None:
        # Failed passes count, and replays: the ranks must agree on which of them are reported.
        self._passes += 1
        self._is_replay = is_replay
        self._norms = {}

    @property
    def _step(self) -> int:
        return self._passes - 1

    async def __call__(self, bucket: Bucket) -> None:
        if self._step % self.every:
            return
        is_cut = self.place is not Place.UPDATED and bucket.owned is not None
        tensors = [tensor.detach() for tensor in (self.counted if is_cut else self.seen)(bucket)]
        each = await self._whole_norms(bucket, tensors) if is_cut else _norms(tensors, self.norm_type)
        self._norms.update(zip(bucket.names, each, strict=True))

    async def _whole_norms(self, bucket: Bucket, parts: list[Tensor]) -> list[Tensor]:
        """The norms of gradients of which each rank has a part."""
        is_max = self.norm_type == float("inf")
        powers = torch.stack(_norms(parts, self.norm_type)).double()
        if not is_max:
            powers.pow_(self.norm_type)
        await all_reduce(powers, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=bucket.group)
        return list((powers if is_max else powers.pow(1 / self.norm_type)).float().unbind())

    def after_backward(self, *, failed: bool) -> None:
        found, self._norms = self._norms, {}
        if failed or self._is_replay or not found:
            return
        assert self.context.names is not None, "checked at registration"
        self._sink(self._step, {name: hold(found[name]) for name in self.context.names.values() if name in found})

    def state_dict(self) -> dict[str, Any]:
        """``{"passes": ...}``, the number of backwards so far."""
        return {"passes": self._passes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; nothing starts from 0."""
        self._passes = state_dict.get("passes", 0)

    def __repr__(self) -> str:
        parts = [f"every={self.every}"] if self.every != 1 else []
        if self.norm_type != 2:
            parts.append(f"norm_type={self.norm_type:g}")
        return f"Log({', '.join(parts)})"


def _norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each tensor; 0 of one without elements."""
    present = [tensor for tensor in tensors if tensor.numel()]
    found = iter(norms(present, norm_type) if present else [])
    return [next(found) if tensor.numel() else torch.zeros((), device=tensor.device) for tensor in tensors]


def _discarded(step: int, norms: dict[str, Tensor]) -> None:
    """Of a stage that is not registered."""


class _Logger:
    """Writes norms to the logger; on an accelerator once they have been computed, without waiting for that."""

    def __init__(self, what: str) -> None:
        self._what = what
        # Copies on their way to the host, in the order in which they were queued.
        self._late: deque[tuple[int, list[str], Tensor, Any]] = deque()

    def __call__(self, step: int, norms: dict[str, Tensor]) -> None:
        if not _logger.isEnabledFor(logging.INFO):
            return
        values = torch.stack([norm.float() for norm in norms.values()])
        if not has_streams(values.device):
            self._write(step, list(norms), values)
            return
        self._late.append((step, list(norms), to_host(values), recorded_event(values.device)))
        self.write_late()

    def write_late(self, *, waits: bool = False) -> None:
        """Write the norms that have arrived; with ``waits`` the host waits for all."""
        while self._late:
            step, names, values, event = self._late[0]
            if waits:
                event.synchronize()
            elif not event.query():
                return
            self._late.popleft()
            self._write(step, names, values)

    def _write(self, step: int, names: list[str], values: Tensor) -> None:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values.tolist(), strict=True))
        _logger.info("norms of %s, step %d: %s", self._what, step, listed)
