"""The shadow of all memory, and of what the caching allocator does with memory that is freed.

[Note: memory that is lent again]

The caching allocator knows the stream that allocated a block. When nothing refers to the block any longer, it goes to
the next allocation on that stream at once: whoever gets it uses it behind all that this stream has queued. What other
streams do with it must be done by then, because that stream has waited for them, or the allocator must have been told
with ``record_stream``. So at each allocation on a stream, all that was freed since the last one is looked at: any of it
could be the block that is lent. Memory of the host is left out: its allocator keeps track of copies by itself.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from .clocks import Access, Timeline
from .shadow import Memory

_SWEEP_EVERY = 1000


class Allocator:
    """Knows all memory. See [Note: memory that is lent again].

    Args:
        before: stands for what has happened to memory that was there before.
        on_reuse: called with an access and the allocation that may get memory that this access still uses.
    """

    def __init__(self, before: Access, on_reuse: Callable[[Access, Access], None]) -> None:
        self._before = before
        self._on_reuse = on_reuse
        self._history: list[Access] = []
        self._memories: dict[int, Memory] = {}
        self._shared: dict[int, Memory] = {}
        self._freed: defaultdict[Timeline, list[Memory]] = defaultdict(list)
        self._allocations = 0
        self.kept_bytes = 0
        """Of storages that have got memory anew, and of which it has not come back. What was recorded for another
        stream comes back when the host has seen that stream's end; here, never."""

    def memory(self, tensor: Tensor) -> Memory:
        """The shadow of the tensor's storage, made when it is first seen."""
        storage = tensor.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None or found.nbytes != storage.nbytes():
            found = self._memories[storage._cdata] = Memory(storage, self._before, self._history)
        return found

    def has_seen(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage has been used or made before."""
        return tensor.untyped_storage()._cdata in self._memories

    def touched(self, tensor: Tensor, access: Access, *, is_write: bool) -> list[Access]:
        """Note an access; returns those that it should be ordered behind and is not."""
        memory = self.memory(tensor)
        unordered = memory.write(tensor, access) if is_write else memory.read(tensor, access)
        if memory.users:
            self._shared[tensor.untyped_storage()._cdata] = memory
        return unordered

    def allocated(
        self, storage: torch.UntypedStorage, access: Access, *, is_host: bool = False, is_pinned: bool = False
    ) -> None:
        """``storage`` has got memory, on the access's timeline."""
        self._collect()
        for memory in self._freed.pop(access.timeline, ()):
            for earlier in memory.unordered_when_lent():
                self._on_reuse(earlier, access)
        self._memories[storage._cdata] = Memory(storage, access, self._history, is_host=is_host, is_pinned=is_pinned)

    def resized(self, storage: torch.UntypedStorage, access: Access | None) -> None:
        """``storage`` has given its memory back, or has got some on the access's timeline."""
        memory = self._memories.get(storage._cdata)
        if memory is not None and memory.is_given_anew and memory.recorded <= {memory.home}:
            self.kept_bytes -= memory.nbytes
        self._free(storage._cdata)
        if access is not None:
            self.allocated(storage, access)
            self._memories[storage._cdata].is_given_anew = True
            self.kept_bytes += storage.nbytes()

    def _free(self, key: int) -> None:
        self._shared.pop(key, None)
        memory = self._memories.pop(key, None)
        if memory is not None and memory.users:
            self._freed[memory.home].append(memory)

    def _collect(self) -> None:
        """Find the storages that have gone. Those of one stream alone are nobody's danger, and are looked at rarely."""
        self._allocations += 1
        looked_at = self._memories if self._allocations % _SWEEP_EVERY == 0 else self._shared
        for key in [key for key, memory in looked_at.items() if memory.is_gone]:
            self._free(key)
