"""What has been done to each byte of a storage, and whether what is done next is ordered behind it."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .clocks import Access, Host, Timeline


class Memory:
    """Shadow of one storage: for each byte its last write, and its last read by each timeline since.

    Args:
        storage: the storage.
        born: the operation on the timeline that allocated it. To allocate is to write.
        history: all accesses; the shadow holds their places in it.
        is_host: whether it is the host's memory; a device's otherwise.
        is_pinned: whether copies between it and a device go on beside the host.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        born: Access,
        history: list[Access],
        *,
        is_host: bool = False,
        is_pinned: bool = False,
    ) -> None:
        self.nbytes = storage.nbytes()
        self.home = born.timeline
        self.is_host = is_host
        self.is_pinned = is_pinned
        self.recorded: set[Timeline] = set()
        """The streams that the allocator waits for before it lends this memory again."""
        self.users: dict[Timeline, Access] = {}
        """The last access by each other stream."""
        self.is_given_anew = False
        """Whether the storage was there before, without memory."""
        self._reference = StorageWeakRef(storage)
        self._history = history
        self._writes = np.full(self.nbytes, self._place(born), dtype=np.int32)
        self._reads: dict[Timeline, np.ndarray] = {}

    @property
    def is_gone(self) -> bool:
        """Whether nothing refers to the storage any longer."""
        return bool(self._reference.expired())

    def read(self, tensor: Tensor, access: Access) -> list[Access]:
        """Note a read of the elements of ``tensor``; returns the writes that it is not ordered behind."""
        region = _region(tensor)
        unordered = list(self._unordered(_part(self._writes, region), access))
        reads = self._reads.get(access.timeline)
        if reads is None:
            reads = self._reads[access.timeline] = np.full(self.nbytes, -1, dtype=np.int32)
        _part(reads, region)[...] = self._place(access)
        self._touched(access)
        return unordered

    def write(self, tensor: Tensor, access: Access) -> list[Access]:
        """Note a write of the elements of ``tensor``; returns the accesses that it is not ordered behind."""
        region = _region(tensor)
        written = _part(self._writes, region)
        unordered = list(self._unordered(written, access))
        for timeline, reads in self._reads.items():
            read = _part(reads, region)
            if timeline is not access.timeline:
                unordered += self._unordered(read, access)
            read[...] = -1
        written[...] = self._place(access)
        self._touched(access)
        return unordered

    def unordered_when_lent(self) -> list[Access]:
        """The accesses that may go on when what comes next on the stream that allocated it uses this memory.

        A recorded stream is done with what it had when the memory was freed, and with all that it had waited for.
        """
        done = (self.home, *self.recorded)
        return [
            access
            for timeline, access in self.users.items()
            if timeline not in self.recorded and not any(one.is_after(access) for one in done)
        ]

    def _touched(self, access: Access) -> None:
        # The host is done with what it has read, and the allocator of its memory knows which copies go on.
        if access.timeline is not self.home and not self.is_host and not isinstance(access.timeline, Host):
            self.users[access.timeline] = access

    def _place(self, access: Access) -> int:
        if not self._history or self._history[-1] is not access:
            self._history.append(access)
        return len(self._history) - 1

    def _unordered(self, places: np.ndarray, access: Access) -> Iterator[Access]:
        if not places.size:
            return
        first = places.flat[0]
        different = (first,) if (places == first).all() else np.unique(places)
        for place in different:
            if place >= 0 and not access.timeline.is_after(self._history[place]):
                yield self._history[place]


Region = slice | tuple[int, tuple[int, ...], tuple[int, ...]]


def _region(tensor: Tensor) -> Region:
    """The bytes of a tensor in its storage: a slice, or an offset, a shape and strides."""
    itemsize = tensor.element_size()
    start = tensor.storage_offset() * itemsize
    if tensor.is_contiguous():
        return slice(start, start + tensor.numel() * itemsize)
    return start, (*tensor.shape, itemsize), (*(stride * itemsize for stride in tensor.stride()), 1)


def _part(of_bytes: np.ndarray, region: Region) -> np.ndarray:
    if isinstance(region, slice):
        return of_bytes[region]
    start, shape, strides = region
    width = of_bytes.itemsize
    return np.ndarray(shape, of_bytes.dtype, of_bytes, start * width, tuple(stride * width for stride in strides))
