"""The streams, events, futures and pinned memory that stand for a device's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from overlap._torch.autograd import in_backward
from overlap._torch.device import DeviceStreams

from .clocks import Event, Moment, Stream
from .operators import tensors_in

if TYPE_CHECKING:
    from .detector import Detector


class SimulatedStreams(DeviceStreams):
    """Takes the place of all devices' streams; see [Note: simulated streams]."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector

    def has_streams(self, device: torch.device) -> bool:
        return True

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Stream:
        return self._detector.new_stream()

    def current_stream(self, device: torch.device) -> Stream:
        return self._detector.current_stream

    def set_stream(self, stream: Stream) -> None:
        self._detector.enter(stream)

    def new_event(self, device: torch.device, *, is_timed: bool) -> Event:
        return Event(self._detector.host, lambda: self._detector.current_stream)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self._detector.record_stream(tensor, stream)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)
        self._detector.resized(storage)

    def future_for(self, device: torch.device) -> Future[Any]:
        return DeviceFuture(self._detector)

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        pinned = self._detector.make_host_memory(tensor.clone(), is_pinned=True)
        made = torch.empty_strided(pinned.size(), pinned.stride(), dtype=pinned.dtype, device=self._detector.device)
        return made.copy_(pinned, non_blocking=True)

    def is_capturing(self, device: torch.device | None) -> bool:
        return False

    def synchronize(self, device: torch.device) -> None:
        self._detector.host.synchronize("synchronize()", self._detector.all_done())


class DeviceFuture(Future):  # type: ignore[type-arg]
    """A future of tensors on a device, as ``Future(devices=...)`` is in C++ (``ivalue_inl.h``).

    To complete it is to record an event on the current stream; to wait for it is to let the current stream wait, and to
    tell the allocator that this stream uses the tensors.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector
        self._moment: Moment | None = None
        self._tensors: list[Tensor] = []

    def set_result(self, result: Any) -> None:
        self._tensors = list(tensors_in(result))
        self._moment = self._detector.current_stream.present()
        super().set_result(result)

    def wait(self) -> Any:
        result = super().wait()
        self.synchronize_current_stream()
        return result

    def synchronize_current_stream(self) -> None:
        if self._moment is None:
            return
        stream = self._detector.current_stream
        stream.join(self._moment)
        for tensor in self._tensors:
            self._detector.record_stream(tensor, stream)

    def then(self, callback: Callable[[Future[Any]], Any]) -> DeviceFuture:
        """As in C++, the callback runs on a stream of its own, which waits for this future."""
        following = DeviceFuture(self._detector)

        def call(done: Future[Any]) -> None:
            with self._detector.on_stream(self._detector.new_stream("a callback's stream")):
                try:
                    self.synchronize_current_stream()
                    result = callback(self)
                except Exception as error:
                    following.set_exception(error)
                else:
                    following.set_result(result)

        super().add_done_callback(call)
        return following


@contextlib.contextmanager
def futures_of_hooks() -> Iterator[None]:
    """Let DDP, which waits in C++ for what hooks registered from now on return, wait for device futures as for its own.

    Its finalization makes the stream wait that is current where ``backward`` was called, and so does a callback that is
    queued when a hook returns, as DDP queues its own behind it. A replay gets the hook's future itself.
    """
    register, run = dist._register_comm_hook, dist.Reducer._run_comm_hook
    returned: list[Any] = []

    def register_watched(reducer: Any, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        def watched(state: Any, bucket: Any) -> Any:
            future = hook(state, bucket)
            if isinstance(future, DeviceFuture) and in_backward():
                torch.autograd.Variable._execution_engine.queue_callback(future.synchronize_current_stream)
            returned[:] = [future]
            return future

        register(reducer, state, watched)

    def run_watched(reducer: Any, bucket: Any) -> Any:
        run(reducer, bucket)
        return returned.pop()

    with (
        mock.patch.object(dist, "_register_comm_hook", register_watched),
        mock.patch.object(dist.Reducer, "_run_comm_hook", run_watched),
    ):
        yield
