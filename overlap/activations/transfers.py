"""[Note: memory that two streams use]

Copies run on a stream of their own, beside the computation, and the caching allocator knows only the stream that a
tensor was allocated for. There are two ways to keep its memory until the copy is done. `record_stream` leaves that to
the allocator, which looks at a later allocation whether the copy is over: it is not while the host runs ahead, so more
memory is taken, at worst that of all activations. Here a reference is held instead until the computation's stream has
been made to wait for the copy. From then on what that stream does next may have the memory, however far the host is
ahead, and what is held until then can be counted.

`record_stream` remains for the unusual: for the stream that waited, where the tensor was allocated for a third one (for
its own stream it does nothing), and for a copy that nobody will wait for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overlap._torch.autograd import version
from overlap._torch.device import current_stream, hold, recorded_event

__all__ = ["Transfer", "Transfers"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy, and the device's tensor that it reads or writes."""

    number: int
    tensor: Tensor
    done: Any
    version: int
    memory: tuple[int, int]
    """Where the tensor's storage is, and of how many bytes."""

    @classmethod
    def queued(cls, number: int, tensor: Tensor) -> Transfer:
        """The copy that the current stream was given last."""
        storage = tensor.untyped_storage()
        # Detached: a tensor with its graph would keep itself, by way of what is saved for it.
        return cls(
            number=number,
            tensor=tensor.detach(),
            done=recorded_event(tensor.device),
            version=version(tensor),
            memory=(storage.data_ptr(), storage.nbytes()),
        )

    @property
    def is_changed(self) -> bool:
        """Whether the tensor has been changed in place since, perhaps while the copy was reading it."""
        return version(self.tensor) != self.version

    def wait(self) -> Tensor:
        """Let the current stream go on only behind the copy; then the tensor need not be held for it any longer."""
        current_stream(self.tensor.device).wait_event(self.done)
        return hold(self.tensor)


class Transfers:
    """Copies in one direction that no computation has waited for yet, by number. Its owner locks it.

    See [Note: memory that two streams use].

    Args:
        copies: the stream of all copies.
    """

    def __init__(self, copies: Any) -> None:
        self.held_bytes = 0
        """Of the device's memory; what several tensors share counts once."""
        self._copies = copies
        self._transfers: OrderedDict[int, Transfer] = OrderedDict()
        self._holders: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return len(self._transfers)

    def get(self, number: int) -> Transfer | None:
        """One that stays held."""
        return self._transfers.get(number)

    def add(self, transfer: Transfer) -> None:
        """Hold its tensor."""
        self._transfers[transfer.number] = transfer
        self._holders[transfer.memory] += 1
        if self._holders[transfer.memory] == 1:
            self.held_bytes += transfer.memory[1]

    def take(self, number: int) -> Transfer | None:
        """One that is held no longer, and must be waited for."""
        transfer = self._transfers.pop(number, None)
        return None if transfer is None else self._let_go(transfer)

    def take_oldest(self) -> Transfer:
        """The one that was added first, likewise."""
        return self._let_go(self._transfers.popitem(last=False)[1])

    def drop(self, number: int) -> None:
        """Nobody will wait for it, if it is there: the allocator gets its memory when the copy is done."""
        transfer = self.take(number)
        if transfer is not None:
            hold(transfer.tensor, self._copies)

    def _let_go(self, transfer: Transfer) -> Transfer:
        self._holders[transfer.memory] -= 1
        if not self._holders[transfer.memory]:
            del self._holders[transfer.memory]
            self.held_bytes -= transfer.memory[1]
        return transfer
