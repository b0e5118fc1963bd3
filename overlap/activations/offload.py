"""[Note: activations on the CPU]

All copies between a device and the CPU run on one stream of the device, beside the computation. A copy to the CPU
starts after the work that the computation has queued so far. A copy back is written to memory of the computation's
stream, after all that was queued there before, and the computation waits for it where the tensor is used. Backward
prefetches the tensors that were stored before the one it fetches.

Each copy is one `cudaMemcpyAsync` from or to pinned memory: both sides have the same dtype and the strides of a dense
tensor, and no pending conjugation or sign. PyTorch copies anything else through pageable memory, which waits for the
device; such tensors are made dense on the device first.

The caching allocator knows only the stream that a tensor was allocated for, so a reference is kept until that stream
has been made to wait for the copy. (`record_stream` would release the memory only when the host finds the copy done,
late if the host runs ahead; it remains for copies that nobody waits for.) At most `IN_FLIGHT_BYTES`, or one tensor, are
kept in each direction: beyond that the computation waits for the oldest copy to the CPU, and nothing more is
prefetched. The host is never blocked.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap._checks import refuse_capture
from overlap._torch.autograd import version
from overlap._torch.device import current_stream, has_streams, hold, host_buffer, new_stream, on_stream, recorded_event
from overlap.errors import TrainingLoopError

__all__ = ["LEAST_BYTES", "offloaded_bytes", "offloading"]

LEAST_BYTES = 1024
IN_FLIGHT_BYTES = 256 * 2**20
_PREFETCHED = 16


def offloading(resident: Iterable[Tensor], *, min_bytes: int) -> saved_tensors_hooks:
    """Keeps the tensors on the CPU that autograd saves inside, except for those in the memory of ``resident``."""
    # Hooks are given detached aliases, so parameters are recognized by their memory.
    kept = {tensor.untyped_storage().data_ptr() for tensor in resident}

    def pack(tensor: Tensor) -> Tensor | _Stored:
        if not _is_plain(tensor) or tensor.nbytes < max(min_bytes, 1) or tensor.untyped_storage().data_ptr() in kept:
            return tensor
        refuse_capture("offload_wrapper", "capture the module without it", tensor.device)
        if not has_streams(tensor.device):
            return _Stored(tensor.clone())
        return _copies_of(tensor.device).store(tensor.detach())

    def unpack(packed: Tensor | _Stored) -> Tensor:
        if not isinstance(packed, _Stored):
            return packed
        return packed.host if packed.copies is None else packed.copies.fetch(packed)

    return saved_tensors_hooks(pack, unpack)


def offloaded_bytes() -> int:
    """Bytes of activations that are kept on the CPU now.

    >>> offloaded_bytes()
    0
    """
    return sum(stored.host.nbytes for stored in _all_stored)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy of the elements makes up the tensor, and takes no more memory than it does (an expanded one)."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


class _Stored:
    """A tensor in the CPU's memory, and on its device for as long as nobody has waited for its copy."""

    copies: _Copies | None = None
    tensor: Tensor | None = None
    """The device's tensor, which a copy reads or writes; ``done`` is the event after that copy."""
    done: Any = None
    version = 0
    is_leaving = False
    is_changed = False
    is_fetched = False
    before: ref[_Stored] | None = None

    def __init__(self, host: Tensor) -> None:
        self.host = host
        _all_stored.add(self)

    def settle(self) -> Tensor:
        """Make the current stream wait for the copy, after which the device's tensor need not be kept."""
        assert self.tensor is not None
        tensor, self.tensor = self.tensor, None
        self.is_changed = self.is_leaving and version(tensor) != self.version
        self.is_leaving = False
        current_stream(tensor.device).wait_event(self.done)
        return hold(tensor)

    def __del__(self) -> None:
        if self.tensor is not None and self.copies is not None:
            hold(self.tensor, self.copies.stream)


_all_stored: WeakSet[_Stored] = WeakSet()


class _Copies:
    """Copies between one device and the CPU. See [Note: activations on the CPU]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = new_stream(device)
        self._lock = threading.Lock()
        self._last: ref[_Stored] | None = None
        self._leaving: deque[tuple[int, ref[_Stored]]] = deque()
        self._leaving_bytes = 0
        """Of device memory, at most: tensors that were dropped count until they are the oldest."""

    def store(self, tensor: Tensor) -> _Stored:
        """Start to copy ``tensor`` to the CPU; other streams must not change it."""
        stride = torch.empty_like(tensor, device="meta").stride()
        if tensor.stride() != stride or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.clone()
        buffer = host_buffer(tensor.nbytes, self.device)
        stored = _Stored(buffer.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()))
        stored.copies, stored.is_leaving = self, True
        self.stream.wait_stream(current_stream(self.device))
        with on_stream(self.stream):
            stored.host.copy_(tensor, non_blocking=True)
            stored.tensor, stored.version, stored.done = tensor, version(tensor), recorded_event(self.device)
        nbytes = tensor.untyped_storage().nbytes()
        with self._lock:
            stored.before, self._last = self._last, ref(stored)
            self._leaving.append((nbytes, self._last))
            self._leaving_bytes += nbytes
            while self._leaving_bytes > IN_FLIGHT_BYTES and len(self._leaving) > 1:
                nbytes, reference = self._leaving.popleft()
                self._leaving_bytes -= nbytes
                if (oldest := reference()) is not None:
                    oldest.settle()
        return stored

    def fetch(self, stored: _Stored) -> Tensor:
        """The tensor on its device, for the current stream.

        Raises:
            TrainingLoopError: the tensor was changed in place while it was copied to the CPU.
        """
        here = stored.tensor if stored.is_leaving else None
        if stored.is_changed or (here is not None and version(here) != stored.version):
            raise TrainingLoopError(
                f"a tensor of shape {tuple(stored.host.shape)} that backward needs was changed in place after it was "
                "saved, while it was copied to the CPU: change a copy of it, or do not offload the module"
            )
        if here is None:
            if stored.tensor is None:
                self._copy_back(stored)
            here = stored.settle()
        stored.is_fetched = True
        self._prefetch(stored)
        return here

    def _prefetch(self, stored: _Stored) -> None:
        nbytes = 0
        for _ in range(_PREFETCHED):
            before = None if stored.before is None else stored.before()
            if before is None:
                return
            stored = before
            if stored.is_fetched or stored.is_leaving:
                continue
            nbytes += stored.host.nbytes
            if nbytes > max(IN_FLIGHT_BYTES, stored.host.nbytes):
                return
            if stored.tensor is None:
                self._copy_back(stored)

    def _copy_back(self, stored: _Stored) -> None:
        host = stored.host
        tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)
        # The memory may have been another tensor's, which the computation still reads.
        self.stream.wait_stream(current_stream(self.device))
        with on_stream(self.stream):
            tensor.copy_(host, non_blocking=True)
            stored.tensor, stored.done = tensor, recorded_event(self.device)


@functools.cache
def _copies_of(device: torch.device) -> _Copies:
    return _Copies(device)
