"""Transfers on the one link of a simulated world, which take their time one after the other.

On a device with streams it is a stream that spins, so that the host never waits; on the CPU a thread that sleeps.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from overlap._torch.custom_group import spin
from overlap._torch.device import current_stream, future_for, has_streams, hold, new_stream, on_stream

# A callback may wait for another transfer: there must be a thread for that one's callbacks, too.
_CALLBACK_THREADS = 64


class TransferQueue(Protocol):
    """Takes transfers, and makes them one after the other."""

    def put(self, duration_s: float, act: Callable[[], None], tensors: Sequence[Tensor], result: Any) -> Future[Any]:
        """Queue a transfer, which keeps the link busy for a time and then calls `act`, which uses `tensors`.

        The future is done with `result` when the transfer is.
        """
        ...


def transfer_queue(tensors: Sequence[Tensor]) -> TransferQueue:
    """The one for the device of `tensors`. All groups of a process share it, as they share a network card."""
    device = tensors[0].device if tensors else torch.device("cpu")
    return _stream_queue(device) if has_streams(device) else _thread_queue()


class _ThreadQueue:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[float, float, Callable[[], None], Future[Any], Any]] = queue.SimpleQueue()
        self._callbacks = ThreadPoolExecutor(_CALLBACK_THREADS, thread_name_prefix="simulated-link-callbacks")
        threading.Thread(target=self._run, name="simulated-link", daemon=True).start()

    def put(self, duration_s: float, act: Callable[[], None], tensors: Sequence[Tensor], result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((time.monotonic(), duration_s, act, future, result))
        return future

    def _run(self) -> None:
        free_at_s = 0.0
        while True:
            issued_at_s, duration_s, act, future, result = self._jobs.get()
            # Against the clock, not by adding sleeps: a late wake-up must not slow the link down.
            free_at_s = max(free_at_s, issued_at_s) + duration_s
            time.sleep(max(0.0, free_at_s - time.monotonic()))
            try:
                act()
            except Exception as error:
                self._callbacks.submit(future.set_exception, error)
            else:
                self._callbacks.submit(future.set_result, result)


class _StreamQueue:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._cycles_per_s = _spin_cycles_per_s(device)

    def put(self, duration_s: float, act: Callable[[], None], tensors: Sequence[Tensor], result: Any) -> Future[Any]:
        future = future_for(self._device)
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            spin(int(duration_s * self._cycles_per_s))
            act()
            for tensor in tensors:
                hold(tensor)
            # Completed on the side stream: whoever waits makes its own stream wait for this point.
            future.set_result(result)
        return future


def _spin_cycles_per_s(device: torch.device) -> float:
    """How fast this device counts the cycles that `spin` is given in."""
    cycles = 50_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        spin(cycles)  # the clock rises under load
        start.record()
        spin(cycles)
        end.record()
        end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return 1000 * cycles / elapsed_ms


_thread_queue = cache(_ThreadQueue)
_stream_queue = cache(_StreamQueue)
