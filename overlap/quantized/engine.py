"""What drives a quantized collective, at once or on a thread of its own."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import future_for, has_streams
from overlap.errors import CollectiveError, QuantizationOverflowError
from overlap.hooks.engine.channels import PrivateChannels
from overlap.hooks.engine.executors import Executor, HostExecutor, Worker, executor_for
from overlap.quantized.algorithms import Collective
from overlap.quantized.same_calls import SameCalls

__all__ = ["QuantizedWork", "run"]


class QuantizedWork:
    """A collective in progress: what ``async_op=True`` returns."""

    def __init__(self, outputs: Sequence[Tensor], what: str, device: torch.device, *, used: Sequence[object]) -> None:
        self._outputs = list(outputs)
        # Arguments of the call. A caller may drop tensors at once, and their memory must not be given away meanwhile.
        self._used = used
        self._what = what
        self._future: torch.futures.Future[list[Tensor]] = future_for(device)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._overflowed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the results are there; on CUDA, until the current stream will wait for them.

        Warns:
            RuntimeWarning: this rank saturated a value.

        Raises:
            CollectiveError: it failed, or took longer than ``timeout``.
            QuantizationOverflowError: a value was too large on some rank, and that was to be an error.
        """
        if not self._done.wait(None if not timeout else timeout.total_seconds()):
            raise CollectiveError(f"{self._what} is not done after {timeout}")
        if self._error is not None:
            raise self._error
        self._future.wait()
        self._used = ()
        if self._overflowed:
            self._overflowed = False
            message = f"{self._what}: values too large for the type that is sent were saturated"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return True

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.is_completed() and self._error is None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the output tensors."""
        return self._future

    def finish(self, overflowed: bool) -> None:
        self._overflowed = overflowed
        self._done.set()
        self._future.set_result(self._outputs)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()
        self._future.set_exception(error)  # type: ignore[arg-type]


class _HostExecutor(HostExecutor):
    """Takes part in a comparison of calls while it waits. See [Note: compared once]."""

    def __init__(self, channels: PrivateChannels, calls: SameCalls) -> None:
        super().__init__(channels)
        self._calls = calls
        self._number, self._call = -1, ""

    def begin_call(self, call: str) -> None:
        """Compare the next call with those of the other ranks. Raises: CollectiveError: they differ."""
        self._number, self._call = self._number + 1, call
        self._calls.check(self._number, call)

    def look(self) -> None:
        self._calls.answer(self._number, self._call)


class _Engine:
    """One process group's thread for tensors of the CPU, with connections of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        channels = PrivateChannels(group)
        self._executor = _HostExecutor(channels, SameCalls(group))
        self._worker = Worker(f"overlap-quantized-{id(self):x}", abandon=channels.abort, group=group)
        weakref.finalize(self, self._worker.stop)

    def submit(self, collective: Collective, work: QuantizedWork, call: str) -> None:
        executor = self._executor
        # Here and not on the thread: connections are made in the order of the program, the same on every rank.
        try:
            executor.channels.open()
        except BaseException:
            collective.close()
            raise
        self._worker.submit(lambda: _drive(collective, work, executor, lambda: executor.begin_call(call)))


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, _Engine] = weakref.WeakKeyDictionary()


def run(collective: Collective, work: QuantizedWork, group: dist.ProcessGroup, device: torch.device, call: str) -> None:
    """Start ``collective``; ``work`` tells when it is done. On the CPU ranks compare a ``call`` that is new to them.

    On CPU tensors with Gloo a thread drives it, one for each group, in the order of calls. Elsewhere it is queued at
    once, on a CUDA device on a side stream, one for each group, in the order of calls.
    """
    if not has_streams(device) and PrivateChannels.can_serve(group):
        if group not in _engines:
            _engines[group] = _Engine(group)
        _engines[group].submit(collective, work, call)
        return
    executor = executor_for(group, device)
    executor.begin()
    with executor.scope():
        _drive(collective, work, executor)


@torch.no_grad()
def _drive(
    collective: Collective, work: QuantizedWork, executor: Executor, begin: Callable[[], None] = lambda: None
) -> None:
    try:
        begin()
        value = None
        while True:
            operation = collective.send(value)
            executor.launch(operation)
            value = operation.finish(executor.wait)
    except StopIteration as stop:
        work.finish(stop.value)
    except QuantizationOverflowError as error:
        work.fail(error)  # On every rank, and nothing is in flight.
    except BaseException as error:
        executor.channels.fail(error)
        collective.close()
        work.fail(error)
