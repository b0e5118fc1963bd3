"""The memory of one of DDP's buckets, which can be released if nothing else refers to it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import current_stream, future_for, has_streams, recorded_event, resize_storage
from overlap._torch.storages import holders, is_referred_to, storage_key, tensors_on
from overlap.hooks import Bucket

__all__ = ["BucketMemory", "Future"]

# A thread of the backend may hold tensors of a collective for a moment after it has told that it is done, and that
# moment is as long as the machine is busy.
_PATIENCE_S = 1.0
# On a storage, beside DDP's of each parameter: DDP's of the bucket, and this module's reference to the storage itself.
_OWN_TENSORS = 2
# To DDP's object for a bucket when backward is over: this module's, and that of the call which counts.
_OWN_REFERENCES = 2

Future = torch.futures.Future[Tensor]


class BucketMemory:
    """The storage of one of DDP's buckets."""

    def __init__(self, bucket: Bucket, key: int) -> None:
        self.key = key
        self.parameters = bucket.parameters
        self.is_done = False
        """Whether all of the bucket is updated in this pass, and may be emptied when backward is over."""
        self._storage = bucket.buffer.untyped_storage()
        self._nbytes = self._storage.nbytes()
        # Of this pass and of the one before, which refers to the buffer. DDP drops that at some time in this pass; as
        # it is kept here, it does not matter when.
        self._future: Future | None = None
        self._former_future: Future | None = None
        self._tensors = self._by_future = 0
        self._holders = 1
        self._raw: Any = None
        self._filled: tuple[Any, Any] | None = None

    @property
    def is_empty(self) -> bool:
        return self._storage.nbytes() < self._nbytes

    @property
    def is_abandoned(self) -> bool:
        """Whether DDP has dropped it: then no parameter has a view of it, though a result of the last pass may."""
        return tensors_on(self._storage) <= _OWN_TENSORS

    def fill(self) -> None:
        """Allocate its memory on the current stream, uninitialized."""
        resize_storage(self._storage, self._nbytes)
        if has_streams(self._storage.device):
            self._filled = current_stream(self._storage.device), recorded_event(self._storage.device)

    def wait_until_filled(self) -> None:
        """Let the current stream wait, if the memory was allocated on another: that stream may still work with what was
        in the same place before."""
        if self._filled is not None and (current := current_stream(self._storage.device)) != self._filled[0]:
            current.wait_event(self._filled[1])

    def empty(self) -> None:
        """Free its memory."""
        resize_storage(self._storage, 0)
        self._filled = None

    def views(self) -> Iterator[Tensor]:
        """The parameters whose ``.grad`` lies in it."""
        for parameter in self.parameters:
            if parameter.grad is not None and storage_key(parameter.grad) == self.key:
                yield parameter

    def note_arrival(self, bucket: Bucket, future: Future) -> None:
        """Before any stage sees the bucket, note how much refers to it."""
        bucket.__dict__.pop("gradients", None)
        # Before DDP's own views are set anew, it has each of them twice.
        self._holders = 2 if self._future is None else 1
        self._raw = bucket.raw
        self._former_future, self._future = self._future, future
        self._tensors = tensors_on(self._storage)
        if not self._by_future:
            self._by_future = _references_of_future(bucket)

    @property
    def is_of_others(self) -> bool:
        """Whether something else has reduced the bucket before, so that it is not known which references DDP has."""
        return self._former_future is None and self._tensors > _OWN_TENSORS + len(self.parameters)

    def used_elsewhere(self, bucket: Bucket | None = None) -> Tensor | None:
        """A parameter whose gradient, or bucket, something else refers to; ``bucket`` is given in the pass alone."""
        if bucket is not None:
            bucket.__dict__.pop("gradients", None)
        until_s = time.monotonic() + _PATIENCE_S
        while (found := self._find_use(bucket)) is not None and time.monotonic() < until_s:
            time.sleep(0.001)
        if found is not None:
            gc.collect()  # An exception of an earlier pass refers to frames, and those to it.
            found = self._find_use(bucket)
        if bucket is None:
            self._raw = None
        return found

    def _find_use(self, bucket: Bucket | None) -> Tensor | None:
        most = self._holders if bucket is not None else 1
        found = next((p for p in self.views() if is_referred_to(p) or holders(p) > most), None)
        if found is not None:
            return found
        tensors, each = tensors_on(self._storage), len(self.parameters)
        is_used = tensors not in (_OWN_TENSORS + each, _OWN_TENSORS + 2 * each)
        if bucket is None:
            is_used |= sys.getrefcount(self._raw) > _OWN_REFERENCES
        else:
            expected = _without_others() + self._by_future * (self._former_future is not None)
            is_used |= tensors > self._tensors or _references_to_buffer(bucket) > expected
        return self.parameters[0] if is_used else None


def _references_to_buffer(bucket: Any) -> int:
    return sys.getrefcount(bucket.buffer)


@cache
def _without_others() -> int:
    """The count where C++ and one bucket have the buffer; how C++ counts differs by version of PyTorch."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    return _references_to_buffer(SimpleNamespace(buffer=parameter.grad))


def _references_of_future(bucket: Bucket) -> int:
    """How often a future that is completed with a buffer refers to it."""
    before, future = _references_to_buffer(bucket), future_for(bucket.buffer.device)
    future.set_result(bucket.buffer)
    return _references_to_buffer(bucket) - before
