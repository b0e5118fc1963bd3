"""A process group that runs each collective on a stream of its own, as NCCL's does.

[Note: simulated collectives]

A collective starts when the stream that is current at the call has done what is queued there, and runs on the
communicator's stream, one after the other. ``work.wait()`` makes the stream that is current *then* wait; until it is
called, the work holds its tensors, so that no allocator lends their memory. ``work.get_future()`` is a device's future.
A barrier blocks the host.

The values come from another backend, Gloo, at once: what a test computes is right, or raises on all ranks, whatever
waits are missing. Messages between two ranks are there when they are waited for.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .clocks import Stream
from .detector import Detector, active
from .operators import tensors_in
from .simulated import DeviceFuture

STREAMS_BACKEND = "simulated-streams"


class StreamWork(dist.Work):
    """A collective on a communicator's stream; without a detector one that is done.

    Args:
        result: the tensors that it fills, for its future.
        held: what it keeps alive until it is waited for.
        arrive: blocks until values that come from another rank are there.
    """

    def __init__(
        self,
        detector: Detector | None,
        stream: Stream | None,
        result: Sequence[Tensor],
        held: Sequence[Tensor],
        arrive: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._detector = detector
        self._moment = None if stream is None else stream.present()
        self._result = list(result)
        self._held = list(held)
        self._arrive = arrive
        self._stream = stream
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait; the host goes on."""
        self._arrive()
        if self._detector is not None and self._moment is not None:
            self._detector.current_stream.join(self._moment)
        self._held.clear()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._arrive()
            if self._detector is None or self._stream is None:
                self._future = torch.futures.Future()
                self._future.set_result(self._result)
            else:
                self._future = DeviceFuture(self._detector)
                with self._detector.on_stream(self._stream):
                    self._future.set_result(self._result)
        return self._future


class StreamGroup(dist.ProcessGroup):
    """A process group on simulated streams; see [Note: simulated collectives].

    Args:
        rank: this rank.
        size: how many there are.
        values: the backend that moves the data, with the methods of ``dist.ProcessGroupGloo``.
        name: of the backend; "fake", as PyTorch's, where no other processes are behind it.
    """

    def __init__(self, rank: int, size: int, values: Any, *, name: str = STREAMS_BACKEND) -> None:
        super().__init__(rank, size)
        self._name = name
        self._size = size
        self._values = values
        self._stream: tuple[Detector, Stream] | None = None

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks up
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        """Nothing that PyTorch could ask more of: since 2.14 it asks subclasses, too, whether messages coalesce."""
        return SimpleNamespace(name=lambda: "none", supports_coalescing=False)

    # A collective is a name, what it writes, what it reads, and the arguments of the backend's method.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run("allreduce", tensors, (), tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        is_source = opts is not None and opts.rootRank == self.rank()
        return self._run("broadcast", () if is_source else tensors, tensors, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run("reduce", tensors, tensors, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._run("allgather", outputs, inputs, outputs, inputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._run("_allgather_base", [output], [input], output, input, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._run("_reduce_scatter_base", [output], [input], output, input, opts)

    # Both names are dispatched to.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        return self._message("send", (), tensors, self._values.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, (), self._values.recv(tensors, src, tag))

    def barrier(self, opts: Any = None) -> Any:
        self._values.barrier().wait()
        if (detector := active()) is not None:
            detector.host.synchronize("barrier", self._communicator(detector).present())
        return StreamWork(None, None, (), ())

    def shutdown(self) -> None:
        pass

    def _run(self, name: str, writes: Any, reads: Any, *args: Any) -> Any:
        """Move the values now; on the communicator's stream the tensors are used when the current one has come here."""
        self._values_of(name, args)
        return self._launched(name, list(tensors_in(list(writes))), list(tensors_in(list(reads))), lambda: None)

    def _message(self, name: str, writes: Sequence[Tensor], reads: Sequence[Tensor], work: Any) -> Any:
        return self._launched(name, writes, reads, lambda: work.wait() and None)

    def _launched(
        self, name: str, writes: Sequence[Tensor], reads: Sequence[Tensor], arrive: Callable[[], None]
    ) -> StreamWork:
        if (detector := active()) is None:
            return StreamWork(None, None, writes, (), arrive)
        stream = self._communicator(detector)
        stream.wait_stream(detector.current_stream)
        detector.access(stream, f"{name} of {stream}", reads=reads, writes=writes)
        return StreamWork(detector, stream, writes, (*reads, *writes), arrive)

    def _values_of(self, name: str, args: tuple[Any, ...]) -> None:
        # Options that the caller left out are left to the backend's own default.
        with _disable_current_modes():  # What the backend does with copies of its own is no concern of the streams.
            getattr(self._values, name)(*(args[:-1] if args[-1] is None else args)).wait()

    def _communicator(self, detector: Detector) -> Stream:
        if self._stream is None or self._stream[0] is not detector:
            self._stream = detector, detector.new_stream("a communicator's stream")
        return self._stream[1]
