"""Devices, their streams and their memory.

Everything about streams goes through this module, so that tests can put simulated ones in the place of a device's
(:func:`streams_replaced`) and run the code for accelerators on tensors of the CPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class DeviceStreams:
    """Streams, events and memory, as PyTorch has them for every accelerator: those of ``torch.cuda`` take
    the host several times as long."""

    def has_streams(self, device: torch.device) -> bool:
        return device.type != "cpu"  # Those of "meta" tensors are never needed, but no value of one can be read.

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Any:
        return torch.Stream(device=device, priority=priority)

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)

    def set_stream(self, stream: Any) -> None:
        torch.accelerator.set_stream(stream)

    def new_event(self, device: torch.device, *, is_timed: bool) -> Any:
        return torch.Event(device, enable_timing=is_timed)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    def future_for(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[device])

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)  # From pageable memory the host would wait.

    def is_capturing(self, device: torch.device | None) -> bool:
        device = device or torch.accelerator.current_accelerator()
        if device is None or device.type in ("cpu", "meta"):
            return False
        module = torch.get_device_module(device)
        # Not all accelerators have graphs. With a build for CUDA that is used on the CPU alone, to ask would take
        # memory of a GPU, or fail without one.
        asked = getattr(module, "is_current_stream_capturing", None)
        return asked is not None and module.is_initialized() and bool(asked())

    def synchronize(self, device: torch.device) -> None:
        torch.get_device_module(device).synchronize(device)


def has_stream_api(device: torch.device) -> bool:
    """Whether PyTorch has streams for ``device``, an accelerator; MPS has one queue."""
    return all(hasattr(torch.get_device_module(device), name) for name in ("Stream", "current_stream", "stream"))


_streams = DeviceStreams()
# Their side streams, by owner. See :func:`stream_of`.
_owned: weakref.WeakKeyDictionary[object, dict[torch.device, Any]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def streams_replaced(streams: DeviceStreams) -> Iterator[None]:
    """Within it, ``streams`` stands for the streams of all devices."""
    global _streams, _owned
    before = _streams, _owned
    _streams, _owned = streams, weakref.WeakKeyDictionary()
    try:
        yield
    finally:
        _streams, _owned = before


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams while the host runs ahead, as on accelerators but not the CPU."""
    return _streams.has_streams(device)


def stream_of(owner: object, device: torch.device, *, priority: int) -> Any:
    """The side stream of ``owner`` on ``device``, made on first use; it is forgotten with its owner.

    An owner that is made anew at each call keeps its stream here: PyTorch has 32 and hands them out in turn, and the
    caching allocator keeps memory for each.
    """
    streams = _owned.setdefault(owner, {})
    if device not in streams:
        streams[device] = _streams.new_stream(device, priority=priority)
    return streams[device]


def current_stream(device: torch.device) -> Any:
    """The current stream of ``device``; ``None`` where there are none."""
    return _streams.current_stream(device) if _streams.has_streams(device) and device.type != "meta" else None


def streams() -> DeviceStreams:
    """Those of all devices, for code that has asked :func:`has_streams`."""
    return _streams


def new_event(device: torch.device) -> Any:
    """An event that can be recorded again and again: whoever waited for it waits for the record of that time."""
    return _streams.new_event(device, is_timed=False)


def recorded_event(device: torch.device, *, is_timed: bool = False) -> Any:
    """An event recorded on the current stream: it is there when the stream has done its queue so far.

    With ``is_timed`` it says when that was."""
    event = _streams.new_event(device, is_timed=is_timed)
    event.record(_streams.current_stream(device))
    return event


def hold(tensor: Tensor, stream: Any = None) -> Tensor:
    """Keep the memory of ``tensor`` from being reused before ``stream``, the current one where ``None``, is done.

    For tensors that one stream has made and another uses: the caching allocator knows the first alone.
    """
    if (user := current_stream(tensor.device) if stream is None else stream) is not None:
        _streams.record_stream(tensor, user)
    return tensor


def hold_all(tensors: Sequence[Tensor]) -> None:
    """:func:`hold` tensors; once for all that are views of one."""
    if tensors and has_streams(tensors[0].device):
        for whole in {id(whole): whole for whole in map(whole_of, tensors)}.values():
            hold(whole)


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor of which ``tensor`` is a view, or itself."""
    return tensor if tensor._base is None else tensor._base


def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give the memory of ``storage`` back (``nbytes`` 0), or give it new memory, whose contents are undefined.

    On an accelerator the current stream gets it. Memory given back goes to the next allocation on the stream that had
    got it; other streams must be done with it by then, or :func:`hold` it.
    """
    _streams.resize_storage(storage, nbytes)


def storage_key(tensor: Tensor) -> int:
    """Identifies the storage of ``tensor`` among those that exist. Private: the address of its owner."""
    return int(tensor.untyped_storage()._cdata)


class Workspace:
    """Memory for one use at a time, of one size, whose views stay while it has none; see :func:`resize_storage`."""

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None
        self._nbytes = 0

    def make(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor whose contents are undefined, for the first use."""
        made = torch.empty(shape, dtype=dtype, device=device)
        self._storage, self._nbytes = made.untyped_storage(), made.nbytes
        return made

    def take(self) -> bool:
        """Whether it was made; then it has memory again, whose contents are undefined. The use before has to have
        ended: plans of a pass that failed are not run again."""
        if self._storage is None:
            return False
        resize_storage(self._storage, self._nbytes)
        return True

    def give_back(self) -> None:
        """The use is over."""
        assert self._storage is not None
        resize_storage(self._storage, 0)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors, in Python, C++ or saved for a backward, use ``storage``; a Python reference to itself counts.
    Private, as in CUDA graph trees."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def future_for(device: torch.device) -> torch.futures.Future[Any]:
    """A future of tensors on ``device``: where there are streams, to wait for it is to make the current one wait."""
    return _streams.future_for(device) if has_streams(device) else torch.futures.Future()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` of ``tensor``, which is in the CPU's memory; the host does not wait for it."""
    return _streams.to_device(tensor, device) if has_streams(device) else tensor.to(device)


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether the current stream of ``device``, the accelerator where ``None``, is being captured into a CUDA graph."""
    return _streams.is_capturing(device)


def synchronize(device: torch.device) -> None:
    """Block the host until ``device`` has done the queues of all of its streams."""
    if has_streams(device):
        _streams.synchronize(device)
