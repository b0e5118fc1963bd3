"""Measuring whether compression pays on this link, for ``bypass="auto"``."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap._torch.device import current_stream, has_streams
from overlap.hooks.collectives import all_reduce

__all__ = ["Measurement", "Trial", "measure"]

_logger = logging.getLogger(__name__)
# The first run of each kind warms up caches and buffers, and work of earlier buckets ends meanwhile.
_REPEATS = 3
# Compressing must save a fifth of the time. It computes, which slows backward down where sending hardly does, and what
# it saves on a link without other traffic is more than beside a backward; in doubt a bucket is sent exactly.
_PAYS = 0.8


@dataclass(frozen=True)
class Trial:
    """A bucket to measure, on copies, so that the training run is not changed."""

    keys: tuple[str, ...]
    """Its parameters that would be compressed."""
    send: Callable[[], Awaitable[None]]
    compress: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Measurement:
    """The time that a bucket takes either way, the mean over ranks."""

    keys: tuple[str, ...]
    send_ms: float
    compress_ms: float

    @property
    def compresses(self) -> bool:
        return self.compress_ms <= _PAYS * self.send_ms

    def __str__(self) -> str:
        choice = "compressed" if self.compresses else "sent as it is"
        return f"{choice}: {self.compress_ms:.2f} ms compressed, {self.send_ms:.2f} ms as it is"


async def measure(
    trials: Iterable[Trial], *, group: dist.ProcessGroup, device: torch.device, what: str
) -> list[Measurement]:
    """Time each bucket's reduction both ways, with the link to itself.

    The times are averaged over ranks by an all-reduce, so every rank comes to the same decision: ``group`` is of all
    ranks of the model, whichever ranks a bucket is reduced over. This is the only place where the host waits for an
    accelerator. ``what`` names the reducer in the log.
    """
    all_keys, own_ms = [], []
    for trial in trials:
        all_keys.append(trial.keys)
        own_ms.append((await _best_ms(trial.send, device), await _best_ms(trial.compress, device)))
    if not all_keys:
        return []
    times_ms = torch.tensor(own_ms, dtype=torch.float64, device=device)
    await all_reduce(times_ms, group=group)
    times_ms /= group.size()
    found = [
        Measurement(keys, send_ms, compress_ms)
        for keys, (send_ms, compress_ms) in zip(all_keys, times_ms.tolist(), strict=True)
    ]
    for measurement in found:
        _logger.info("%s bypass, %d parameters %s", what, len(measurement.keys), measurement)
    return found


async def _best_ms(run: Callable[[], Awaitable[None]], device: torch.device) -> float:
    best_s = float("inf")
    for _ in range(_REPEATS):
        start_s = _now_s(device)
        await run()
        best_s = min(best_s, _now_s(device) - start_s)
    return 1e3 * best_s


def _now_s(device: torch.device) -> float:
    if has_streams(device):
        current_stream(device).synchronize()
    return time.perf_counter()
