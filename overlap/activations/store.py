"""Where activations of a device are kept on the CPU.

[Note: one stream of copies]

All copies between a device and the buffers go through one stream, in the order in which they are asked for. So a buffer
may be used again as soon as its last copy has been asked for: the next copy into it comes behind. A copy out starts
behind what the computation has queued so far (the values are there) and the computation goes on beside it; the caching
allocator is told that the copy reads the tensor (`record_stream`), so its memory is not given away before. A copy back
in goes to memory of the computation's stream, behind all that was queued there before, and the computation waits for it
where the tensor is used.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import has_streams

__all__ = ["Store", "Stored", "store_of", "stores"]

_BUFFER_GRAIN_BYTES = 512
# Pinning memory is slow, getting it is not: on a device that copies by itself the default is all that a step needs.
_CPU_POOL_BYTES = 64 * 2**20


_stores: dict[tuple[str, int], Store] = {}


def store_of(device: torch.device) -> Store:
    """The one store of a device."""
    index = device.index
    if index is None:
        index = 0 if device.type == "cpu" else torch.get_device_module(device).current_device()
    store = _stores.get((device.type, index))
    if store is None:
        store = _stores[device.type, index] = Store(torch.device(device.type, index))
    return store


def stores() -> list[Store]:
    """Those of all devices that were asked for."""
    return list(_stores.values())


class Store:
    """Lends buffers in the CPU's memory, pinned for a device that copies by itself, and makes the copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lent_bytes = 0
        self.free_bytes = 0
        self.pool_bytes = float("inf") if has_streams(device) else _CPU_POOL_BYTES
        """At most so much is kept that is not lent."""
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        # Reentrant: a buffer comes back when the collector finds it, which can be anywhere.
        self._lock = threading.RLock()
        self._copies: Any = torch.get_device_module(device).Stream(device=device) if has_streams(device) else None
        self._last: weakref.ref[Stored] | None = None

    def put(self, tensor: Tensor) -> Stored:
        """Start to copy ``tensor`` here; it may be freed at once, and must not be changed by other streams."""
        buffer = self._take(tensor.nbytes)
        # Those of a dense tensor, whatever their order, or of a contiguous one.
        stride = torch.empty_like(tensor, device="meta").stride()
        with self._lock:
            stored = Stored(self, buffer, tensor.size(), stride, tensor.dtype, self._last)
            self._last = weakref.ref(stored)
        if self._copies is None:
            stored.host.copy_(tensor)
            return stored
        module = torch.get_device_module(self.device)
        self._copies.wait_stream(module.current_stream(self.device))
        with module.stream(self._copies):
            stored.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)
        return stored

    def copy_back(self, stored: Stored) -> tuple[Tensor, Any]:
        """Start to copy what is stored to its device; returns the tensor and the event to wait for."""
        out = torch.empty_strided(stored.size, stored.stride, dtype=stored.dtype, device=self.device)
        if self._copies is None:
            return out.copy_(stored.host), None
        module = torch.get_device_module(self.device)
        # The memory may have been another tensor's, which the computation still reads.
        self._copies.wait_stream(module.current_stream(self.device))
        with module.stream(self._copies):
            out.copy_(stored.host, non_blocking=True)
            arrived = self._copies.record_event()
        # One that was fetched ahead may be dropped without ever being waited for.
        out.record_stream(self._copies)
        return out, arrived

    def wait_for(self, arrived: Any) -> None:
        """Let the current stream go on only behind a copy."""
        if arrived is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(arrived)

    def _take(self, nbytes: int) -> Tensor:
        size = -(-nbytes // _BUFFER_GRAIN_BYTES) * _BUFFER_GRAIN_BYTES
        with self._lock:
            self.lent_bytes += size
            if self._free[size]:
                self.free_bytes -= size
                return self._free[size].pop()
            if self.free_bytes > self.lent_bytes:
                # Buffers of sizes that are no longer asked for, or most would be in use: the shapes have changed.
                self.release()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._copies is not None)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        with self._lock:
            self.lent_bytes -= buffer.numel()
            if self.free_bytes + buffer.numel() <= self.pool_bytes:
                self.free_bytes += buffer.numel()
                self._free[buffer.numel()].append(buffer)

    def limit(self, pool_bytes: float) -> None:
        """Keep at most so much that is not lent, from now on."""
        with self._lock:
            self.pool_bytes = pool_bytes
            if self.free_bytes > pool_bytes:
                self.release()

    def release(self) -> int:
        """Give back all memory that is not lent; returns how many bytes that were."""
        with self._lock:
            released, self.free_bytes = self.free_bytes, 0
            self._free.clear()
        return released


class Stored:
    """A tensor in a buffer, which goes back to the store with this object."""

    def __init__(
        self,
        store: Store,
        buffer: Tensor,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        before: weakref.ref[Stored] | None,
    ) -> None:
        self.size = size
        self.stride = stride
        self.dtype = dtype
        self._store = store
        self._buffer = buffer
        self._before = before
        self._ahead: tuple[Tensor, Any] | None = None

    @property
    def host(self) -> Tensor:
        """The tensor in the CPU's memory."""
        nbytes = self.size.numel() * self.dtype.itemsize
        return self._buffer[:nbytes].view(self.dtype).as_strided(self.size, self.stride)

    def fetch(self) -> Tensor:
        """The tensor on its device, a new one at each call."""
        tensor, arrived = self._ahead or self._store.copy_back(self)
        self._ahead = None
        self._store.wait_for(arrived)
        # Backward goes the other way: what was stored before this comes next.
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch_ahead()
        return tensor

    def fetch_ahead(self) -> None:
        """Start to copy, where that goes on beside the computation."""
        if self._ahead is None and has_streams(self._store.device):
            self._ahead = self._store.copy_back(self)

    def __del__(self) -> None:
        self._store.give(self._buffer)
