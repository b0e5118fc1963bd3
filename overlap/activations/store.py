"""Where activations of a device are kept on the CPU.

[Note: one stream of copies]

All copies between a device and the buffers go through one stream, in the order in which they are asked for. So a buffer
may be used again as soon as its last copy has been asked for: the next copy into it comes behind. A copy out starts
behind what the computation has queued so far (the values are there) and the computation goes on beside it. A copy back
in goes to memory of the computation's stream, behind all that was queued there before, and the computation waits for it
where the tensor is used.

Each copy is one `cudaMemcpyAsync`, to or from pinned memory: both sides have the same dtype and the same strides, of a
dense tensor. PyTorch copies anything else by way of pageable memory, which waits for the device; and from a conjugated
or negated view it copies what lies in memory and changes the sign on the CPU at once, before it has arrived. Such
tensors are made dense and plain on the device first, by the computation's stream.

[Note: memory in flight]

Out of the device's memory, at most `in_flight_bytes` are held for copies to the CPU: when there is more, the
computation waits for the oldest of them. At most as much is fetched ahead of backward. One tensor may be on its way in
either direction, however large it is. Neither blocks the host.

What backward needs while it is still on its way out is used where it is, without a copy back. A tensor that was changed
in place meanwhile is an error, as it is in autograd, since the copy may have read either value; a change after the
computation has waited for the copy does no harm.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import current_stream, has_streams, host_buffer, new_stream, on_stream
from overlap.activations.transfers import Transfer, Transfers
from overlap.errors import TrainingLoopError

__all__ = ["Store", "Stored", "store_of", "stores"]

_BUFFER_GRAIN_BYTES = 512
# Pinning memory is slow, getting it is not: on a device that copies by itself the default is all that a step needs.
_CPU_POOL_BYTES = 64 * 2**20
_IN_FLIGHT_BYTES = 256 * 2**20


_stores: dict[tuple[str, int], Store] = {}


class _Bookkeeping:
    """``with _bookkeeping:`` only this thread changes what stores know. One for all stores.

    [Note: buffers that come back]

    A stored tensor gives its buffer back when nothing refers to it any longer. Python or its collector may find that at
    any moment, on any thread, in the middle of bookkeeping, too, and a count that is changed between being read and
    being written is wrong from then on. So a finalizer only says what has come back. It is taken in at once where
    nobody is at the books, and otherwise by whoever is, at the end. No bookkeeping ever runs inside of another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came_back: deque[tuple[Store, int, Tensor]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._take_in()

    def give_back(self, store: Store, number: int, buffer: Tensor) -> None:
        """Called by finalizers."""
        self._came_back.append((store, number, buffer))
        self._take_in()

    def _take_in(self) -> None:
        # What comes when the lock is held here is seen by the loop, and what comes after it is asked for once more.
        while self._came_back and self._lock.acquire(blocking=False):
            try:
                while self._came_back:
                    store, number, buffer = self._came_back.popleft()
                    store.forget(number, buffer)
            finally:
                self._lock.release()


_bookkeeping = _Bookkeeping()


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
        self.in_flight_bytes = _IN_FLIGHT_BYTES
        """At most so much of the device's memory is held in each direction. See [Note: memory in flight]."""
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._copies: Any = new_stream(device) if has_streams(device) else None
        self.leaving = Transfers(self._copies)
        self.returning = Transfers(self._copies)
        self._changed: set[int] = set()
        self._count = 0
        self._last: weakref.ref[Stored] | None = None
        self._next: weakref.ref[Stored] | None = None
        """What is to be fetched ahead next."""

    def put(self, tensor: Tensor) -> Stored:
        """Start to copy ``tensor`` here; it may be freed at once, and must not be changed by other streams.

        Raises:
            torch.OutOfMemoryError: there is no memory to make it dense on its device.
            RuntimeError: there is no memory on the CPU.
        """
        # Those of a dense tensor, whatever their order, or of a contiguous one.
        stride = torch.empty_like(tensor, device="meta").stride()
        if self._copies is not None and (tensor.stride() != stride or tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.clone()
            stride = tensor.stride()
        with _bookkeeping:
            self._count += 1
            buffer = self._take(tensor.nbytes)
            stored = Stored(self, self._count, buffer, tensor.size(), stride, tensor.dtype, self._last)
            self._last = weakref.ref(stored)
        if self._copies is None:
            stored.host.copy_(tensor)
            return stored
        self._copies.wait_stream(current_stream(self.device))
        with on_stream(self._copies):
            stored.host.copy_(tensor, non_blocking=True)
            transfer = Transfer.queued(stored.number, tensor)
        with _bookkeeping:
            self.leaving.add(transfer)
            self._bound_leaving()
        return stored

    def fetch(self, stored: Stored) -> Tensor:
        """What is stored, on its device, for the current stream.

        Raises:
            TrainingLoopError: the tensor was changed in place while it was copied out.
        """
        if self._copies is None:
            return self._empty(stored).copy_(stored.host)
        with _bookkeeping:
            here = self.leaving.get(stored.number)
            if stored.number in self._changed or (here is not None and here.is_changed):
                raise TrainingLoopError(
                    f"a tensor of shape {tuple(stored.size)} that backward needs was changed in place after it was "
                    f"saved, while it was on its way to the CPU: change a copy of it, or do not offload the module"
                )
            if here is not None:
                tensor = here.tensor
            else:
                tensor = (self.returning.take(stored.number) or self._copy_back(stored)).wait()
            # Backward goes the other way: what was stored before this comes next.
            if not stored.is_expected:
                stored.is_expected = True
                self._next = stored.before
            self._fetch_ahead()
        return tensor

    def forget(self, number: int, buffer: Tensor) -> None:
        """Nobody will fetch what has this number: take its buffer back. Called in the bookkeeping."""
        for transfers in (self.leaving, self.returning):
            transfers.drop(number)
        self._changed.discard(number)
        nbytes = buffer.numel()
        self.lent_bytes -= nbytes
        if self.free_bytes + nbytes <= self.pool_bytes:
            self.free_bytes += nbytes
            self._free[nbytes].append(buffer)

    def limit(self, pool_bytes: float) -> None:
        """Keep at most so much that is not lent, from now on."""
        with _bookkeeping:
            self.pool_bytes = pool_bytes
            if self.free_bytes > pool_bytes:
                self._release()

    def release(self) -> int:
        """Give back all memory that is not lent; returns how many bytes that were."""
        with _bookkeeping:
            return self._release()

    def _release(self) -> int:
        released, self.free_bytes = self.free_bytes, 0
        self._free.clear()
        return released

    def _take(self, nbytes: int) -> Tensor:
        size = -(-nbytes // _BUFFER_GRAIN_BYTES) * _BUFFER_GRAIN_BYTES
        if self._free[size]:
            buffer = self._free[size].pop()
            self.free_bytes -= size
        else:
            if self.free_bytes > self.lent_bytes + size:
                # Buffers of sizes that are no longer asked for, or most would be in use: the shapes have changed.
                self._release()
            buffer = host_buffer(size, self.device)
        self.lent_bytes += size
        return buffer

    def _empty(self, stored: Stored) -> Tensor:
        return torch.empty_strided(stored.size, stored.stride, dtype=stored.dtype, device=self.device)

    def _copy_back(self, stored: Stored) -> Transfer:
        tensor = self._empty(stored)
        # The memory may have been another tensor's, which the computation still reads.
        self._copies.wait_stream(current_stream(self.device))
        with on_stream(self._copies):
            tensor.copy_(stored.host, non_blocking=True)
            return Transfer.queued(stored.number, tensor)

    def _bound_leaving(self) -> None:
        while self.leaving.held_bytes > self.in_flight_bytes and len(self.leaving) > 1:
            oldest = self.leaving.take_oldest()
            if oldest.is_changed:
                self._changed.add(oldest.number)
            oldest.wait()

    def _fetch_ahead(self) -> None:
        while self._next is not None and (stored := self._next()) is not None:
            if not stored.is_expected and self.leaving.get(stored.number) is None:
                if len(self.returning) and self.returning.held_bytes + stored.nbytes > self.in_flight_bytes:
                    return
                try:
                    self.returning.add(self._copy_back(stored))
                except torch.OutOfMemoryError:
                    return  # It is not needed yet; what is freed meanwhile may be enough.
            stored.is_expected = True
            self._next = stored.before


class Stored:
    """A tensor in a buffer, which goes back to the store with this object."""

    def __init__(
        self,
        store: Store,
        number: int,
        buffer: Tensor,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        before: weakref.ref[Stored] | None,
    ) -> None:
        self.store = store
        self.number = number
        self.buffer = buffer
        self.size = size
        self.stride = stride
        self.dtype = dtype
        self.before = before
        self.is_expected = False
        """Whether it has been fetched, or will be without having to be fetched ahead."""

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    @property
    def host(self) -> Tensor:
        """The tensor in the CPU's memory."""
        return self.buffer[: self.nbytes].view(self.dtype).as_strided(self.size, self.stride)

    def fetch(self) -> Tensor:
        """The tensor on its device: a copy, or the tensor itself while it is on its way to the CPU."""
        return self.store.fetch(self)

    def __del__(self) -> None:
        _bookkeeping.give_back(self.store, self.number, self.buffer)
