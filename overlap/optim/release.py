"""Releasing the memory of gradients while backward runs.

[Note: gradient release]

A gradient is needed until its bucket is updated. DDP keeps the memory of all buckets all the time, and ``.grad`` are
views of it (``gradient_as_bucket_view=True``). A released bucket goes through this:

1. *Empty*, between passes: its storage has no memory, and ``.grad`` of its parameters is ``None``.
2. A tensor hook of each parameter runs before autograd sets ``.grad``, and so before DDP copies into the bucket. The
   first one allocates the storage. Where DDP looks for unused parameters, it writes their zeros at the first gradient
   of all, and so does the hook allocate all storages.
3. When the bucket's last stage is done and all of its parameters are updated, the storage is emptied again. On streams
   that is when a later bucket is allocated: the stream that had allocated it first waits until the stages' stream is
   done with it, and may have its memory at once. (The allocator keeps memory that was told of another stream, by
   ``record_stream``, until the host has seen that stream come to its end, and the host runs far ahead.) The last two
   buckets are left alone, so that the wait is for work that was done long ago.
4. DDP's finalization makes views of every bucket, and reads no value: where ``.grad`` is ``None`` it sets a view, and
   nothing is copied from the hook's result, which is the bucket itself. So when the last bucket arrives, all storages
   are allocated once more until backward is over. On a CPU memory that is not touched takes nothing. Elsewhere it takes
   blocks, when the activations are gone.
5. When backward is over, ``.grad`` is cleared and everything is emptied.

A backward under ``no_sync`` does not touch the buckets. After its first pass DDP builds other buckets; the former ones
stay empty.

Reading freed memory would crash, so a storage is emptied only if its use count is that of DDP's own tensors. For that,
nobody is given a tensor of DDP's: stages get a bucket with a tensor of its own on the storage, and ``.grad`` is
replaced by one wherever it stays. So a gradient or a bucket that a loop or a backend keeps adds to the count: its
memory stays, and is emptied at the first event (another bucket, the end of backward, the next forward) after it was
dropped.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from overlap._torch.c10d import bucket_gradients
from overlap._torch.ddp import backward_may_synchronize
from overlap._torch.device import (
    current_stream,
    has_streams,
    hold,
    recorded_event,
    resize_storage,
    storage_key,
    storage_uses,
)
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import Bucket, StageContext
from overlap.optim.gradients import PassGradients

# Of a storage, beside DDP's views: DDP's tensor of the whole bucket, and this module's reference to the storage.
_OWN_USES = 2
# So many buckets that are done are not waited for on streams.
_LEFT_ALONE = 2


def check_releasable(context: StageContext, stage: object) -> None:
    """Raises: ConfigurationError, UnsupportedError: the gradients of this model cannot be released."""
    ddp = None if context.ddp is None else context.ddp()
    if context.names is None or ddp is None:
        raise ConfigurationError(
            f"{stage!r} has to know the model's parameters, which a hook registered with ddp.register_comm_hook does "
            "not: use chain(...).register(ddp), or release_gradients=False"
        )
    if not ddp.gradient_as_bucket_view:
        raise ConfigurationError(
            f"{stage!r}: this DistributedDataParallel copies all gradients out of its buckets at the end of backward, "
            "so all would be in memory again; build it with gradient_as_bucket_view=True, or use "
            "release_gradients=False"
        )
    for parameter, name in context.names.items():
        if parameter.is_complex() and parameter.requires_grad:
            raise UnsupportedError(
                f"{stage!r}: {name} is {parameter.dtype}, and DDP has the gradient in its bucket as pairs of real "
                "numbers, by views that cannot be distinguished from others: use release_gradients=False"
            )


class _Memory:
    """The storage of one of DDP's buckets."""

    def __init__(self, bucket: Bucket) -> None:
        assert bucket.raw is not None, "a bucket that arrives is DDP's"
        self.key = storage_key(bucket.buffer)
        self.parameters = bucket.parameters
        self.is_done = False
        """Whether all of the bucket is updated, so that nothing needs its values until the next pass."""
        self.is_empty = False
        """Whether the storage has no memory."""
        self._storage = bucket.buffer.untyped_storage()
        self._nbytes = self._storage.nbytes()
        start = int(bucket.buffer.storage_offset())
        views = bucket_gradients(bucket.raw)
        self._layout = tuple((view.size(), view.stride(), int(view.storage_offset()) - start) for view in views)
        # From DDP's first finalization on, it has a second view for each parameter, of the hook's result.
        self._is_finalized = False
        # The stream that has allocated the storage, and the event of that; and the event of its last use.
        self._allocation: tuple[Any, Any] | None = None
        self._last_use: Any = None

    def lend(self, bucket: Bucket) -> Bucket:
        """``bucket`` for the stages: its buffer counts as a use of the storage while anything keeps it."""
        self._detach_gradients()
        return replace(bucket, buffer=bucket.buffer.data, raw=None, views=self._layout)

    def _detach_gradients(self) -> None:
        """Replace each ``.grad`` in the storage, which may be DDP's view, by a tensor that counts as a use."""
        for parameter, gradient in self._gradients():
            parameter.grad = gradient.data

    def note_done(self, buffer: Tensor) -> None:
        """The bucket with this ``buffer`` is updated, when the current stream has done its queue so far."""
        self.clear_gradients()
        self.is_done = True
        if self._allocation is None:
            hold(buffer)  # DDP has allocated it, on any stream.
        else:
            self._last_use = recorded_event(buffer.device)

    def clear_gradients(self) -> None:
        for parameter, _ in self._gradients():
            parameter.grad = None

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        pairs = ((parameter, parameter.grad) for parameter in self.parameters)
        return [(p, gradient) for p, gradient in pairs if gradient is not None and storage_key(gradient) == self.key]

    def finalize(self, *, failed: bool) -> None:
        """Backward is over. After a failure it is not known whether DDP has finalized, until the next pass is over."""
        self._is_finalized = not failed
        self._detach_gradients()

    @property
    def is_dropped(self) -> bool:
        """Whether DDP has built other buckets: then it has no view, though a result of the last pass may be left."""
        return storage_uses(self._storage) <= _OWN_USES

    def allocate(self) -> None:
        resize_storage(self._storage, self._nbytes)
        self.is_empty = False
        if has_streams(self._storage.device):
            self._allocation = current_stream(self._storage.device), recorded_event(self._storage.device)

    def wait_until_allocated(self) -> None:
        """Let the current stream wait if another allocated the storage, which may still use that memory."""
        if self._allocation is not None and (current := current_stream(self._storage.device)) != self._allocation[0]:
            current.wait_event(self._allocation[1])

    def empty_if_idle(self) -> bool:
        """Empty the storage if only DDP's own tensors use it; returns whether it did."""
        if storage_uses(self._storage) != _OWN_USES + len(self.parameters) * (1 + self._is_finalized):
            return False
        if self._allocation is not None and self._last_use is not None:
            self._allocation[0].wait_event(self._last_use)
        resize_storage(self._storage, 0)
        self._allocation = self._last_use = None
        self.is_empty = True
        return True


class _Pass(enum.Enum):
    """The state of a model's buckets."""

    NONE = "none"
    """Since the last pass there was no forward whose backward synchronizes."""
    DUE = "due"
    """The next gradient may be the first of a pass."""
    RUNNING = "running"
    """Buckets arrive; each is emptied when it is updated."""
    ENDING = "ending"
    """The last bucket has arrived: all are allocated until backward is over."""


class GradientRelease:
    """Releases the buckets of one model. See [Note: gradient release]. It watches them: see ``StageContext.watch``.

    Args:
        context: of the stage that registers it.
        updates: of the updates that release, which gradients of the last backward have been applied, and may go; they
            are told which have.
    """

    def __init__(self, context: StageContext, updates: Sequence[PassGradients]) -> None:
        assert context.ddp is not None, "see check_releasable"
        self._ddp = context.ddp
        self._names = context.names or {}
        self._finds_unused = bool(context.finds_unused)
        self._updates = updates
        # Between autograd's thread and the one that runs stages.
        self._lock = threading.Lock()
        self._memories: dict[int, _Memory] = {}  # By storage.
        self._by_parameter: dict[int, _Memory] = {}
        self._pass = _Pass.NONE
        self._hooks: list[Any] = []
        self._without_hook = list(self._names)
        self.before_forward()
        context.watch(self)

    def before_forward(self) -> None:
        """A forward begins, whose parameters get gradients, also those that were frozen before."""
        ddp = self._ddp()
        if self._pass is _Pass.NONE and ddp is not None and ddp.require_backward_grad_sync:
            self._pass = _Pass.DUE
        with self._lock:
            self._empty_done()
        alive = weakref.ref(self)
        for parameter in [parameter for parameter in self._without_hook if parameter.requires_grad]:
            self._hooks.append(parameter.register_hook(_before_gradient(id(parameter), alive)))
        self._without_hook = [parameter for parameter in self._without_hook if not parameter.requires_grad]

    def before_gradient(self, parameter: int) -> None:
        """The gradient of the parameter with this ``id`` is about to be written."""
        if self._pass is _Pass.NONE:  # Without a forward that was noted: ``ddp.forward(...)`` may have been called.
            ddp = self._ddp()
            if ddp is not None and not backward_may_synchronize(ddp):
                return
        is_first = self._pass in (_Pass.NONE, _Pass.DUE)
        if is_first:
            self._pass = _Pass.RUNNING
        memory = self._by_parameter.get(parameter)
        if is_first and self._finds_unused:
            with self._lock:
                self._allocate(list(self._memories.values()))
        elif memory is not None and memory.is_empty:
            with self._lock:
                self._empty_done(but=_LEFT_ALONE)
                self._allocate([memory])
        if memory is not None:
            memory.wait_until_allocated()

    def arrived(self, bucket: Bucket) -> Bucket:
        with self._lock:
            if bucket.index == 0:
                self._begin(_Pass.RUNNING)
            if not bucket.buffer.is_sparse:  # Otherwise the pass is going to fail.
                bucket = self._memory_of(bucket).lend(bucket)
            if bucket.is_last:
                self._pass = _Pass.ENDING
                self._allocate(list(self._memories.values()))
        return bucket

    def _begin(self, state: _Pass) -> None:
        self._pass = state
        for memory in self._memories.values():
            memory.is_done = False

    def _memory_of(self, bucket: Bucket) -> _Memory:
        memory = self._memories.get(storage_key(bucket.buffer))
        if memory is None:
            for parameter in bucket.parameters:
                if (former := self._by_parameter.get(id(parameter))) is not None:
                    self._memories.pop(former.key, None)
            memory = _Memory(bucket)
            self._memories[memory.key] = memory
            self._by_parameter.update((id(parameter), memory) for parameter in bucket.parameters)
        return memory

    def through(self, bucket: Bucket) -> None:
        if bucket.buffer.is_sparse:
            return
        memory = self._by_parameter[id(bucket.parameters[0])]
        with self._lock:
            if all(self._may_go(parameter, memory) for parameter in memory.parameters):
                memory.note_done(bucket.buffer)
            if has_streams(bucket.buffer.device):
                return
            if self._pass is not _Pass.ENDING:
                self._empty_done()
            elif memory.is_done and memory.empty_if_idle():
                memory.allocate()

    def _may_go(self, parameter: Tensor, memory: _Memory) -> bool:
        if any(id(parameter) in update.applied for update in self._updates):
            return True
        gradient = parameter.grad
        if gradient is None:
            # If another rank has used it, DDP is going to set the mean.
            return any(id(parameter) in update.unused for update in self._updates)
        return storage_key(gradient) != memory.key

    def over(self, *, failed: bool) -> None:
        with self._lock:
            for memory in self._memories.values():
                memory.finalize(failed=failed)
            if failed:
                self._restore()
                return
            self._pass = _Pass.NONE
            for memory in [memory for memory in self._memories.values() if memory.is_done]:
                memory.clear_gradients()
                for update in self._updates:
                    update.released.update(id(p) for p in memory.parameters if id(p) in update.applied)
                memory.empty_if_idle()

    def _empty_done(self, *, but: int = 0) -> None:
        """Empty the buckets that are done, ``but`` the last ones, unless they are in use; DDP finalizes none of them
        now."""
        done = [memory for memory in self._memories.values() if memory.is_done and not memory.is_empty]
        for memory in done[: max(0, len(done) - but)] if self._pass is not _Pass.ENDING else ():
            memory.empty_if_idle()

    def remove(self) -> None:
        """Allocate every bucket again, for the model trains on without release."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._without_hook = [], []
        with self._lock:
            self._restore()
            self._memories, self._by_parameter = {}, {}

    def _restore(self) -> None:
        self._begin(_Pass.DUE)
        self._allocate(list(self._memories.values()))

    def _allocate(self, memories: list[_Memory]) -> None:
        for memory in memories:
            if memory.is_empty and memory.is_dropped:
                self._memories.pop(memory.key, None)
            elif memory.is_empty:
                memory.allocate()


def _before_gradient(parameter: int, alive: weakref.ref[GradientRelease]) -> Callable[[Tensor], None]:
    """A tensor hook. It holds no reference: a cycle through autograd's hooks could never be collected."""

    def hook(gradient: Tensor) -> None:
        if (release := alive()) is not None:
            release.before_gradient(parameter)

    return hook
