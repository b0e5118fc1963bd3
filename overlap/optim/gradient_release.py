"""Releasing the memory of gradients while backward runs.

[Note: gradient release]

A gradient is needed from the moment it is made until its bucket is updated. DDP keeps the memory of all its buckets all
the time, and ``.grad`` are views of it (``gradient_as_bucket_view=True``). A released bucket goes through this:

1. *Empty*, between passes: its storage has no memory, and ``.grad`` of its parameters is ``None``.
2. A tensor hook of each parameter runs before autograd sets ``.grad``, and so before DDP copies into the bucket. That
   of the first gradient that comes gives the storage its memory back. Where DDP looks for unused parameters, it writes
   their zeros when the first gradient of all has come: then all storages get theirs.
3. When the bucket's last stage is done and all of its parameters are updated, the storage is emptied again.
4. DDP's finalization cuts views of every bucket, and looks at no value: where ``.grad`` is ``None`` it sets a view, and
   what the hook has returned is the bucket itself, of which nothing is copied. So when the last bucket comes, before
   DDP can begin that, all storages get memory once more, and keep it until backward is over. On a CPU memory that
   nobody touches takes nothing. Elsewhere it takes blocks, when the activations are gone.
5. When backward is over, ``.grad`` is cleared and everything is emptied.

A backward under ``no_sync`` does not come near the buckets: its gradients get memory of their own, and no storage is
filled for them. After its first pass DDP makes other buckets; those of before, which it has let go, stay empty.

Reading memory that was freed would crash. So a storage is emptied only if nothing else has a tensor on it: DDP has one
for the bucket and one or two for each parameter (its views of before and after the reduction), and
:class:`~overlap.optim.bucket_memory.BucketMemory` one reference; Python must not hold ``.grad``, nor the bucket, which
stages are given a copy of, nor its buffer. If something does, the memory stays, the update is made as usual, and
backward raises. A bucket with a gradient that no update has applied, such as one of a parameter that no optimizer has,
or one of a backward in ``skip_update()``, stays as it is.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from overlap._torch.ddp import backward_may_synchronize
from overlap._torch.device import has_streams, hold
from overlap._torch.storages import storage_key
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, StageContext
from overlap.optim.bucket_memory import BucketMemory, Future

__all__ = ["GradientRelease", "check_releasable"]


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


class _Pass(enum.Enum):
    """The state of a model's buckets."""

    NONE = "none"
    """Since the last pass no forward was seen whose backward synchronizes."""
    DUE = "due"
    """The next gradient may be the first of a pass."""
    COMING = "coming"
    """Gradients come; a bucket is emptied when it is updated."""
    ENDING = "ending"
    """The last bucket has come: all have memory until backward is over."""


class GradientRelease:
    """Releases the buckets of one model. See [Note: gradient release].

    Told what happens: a gradient comes (by hooks of its own), a bucket has arrived, is through, backward is over or has
    failed (as the ``BucketWatcher`` of the model), the registration is removed.

    Args:
        context: of the stage that registers it.
        is_applied: whether the last backward's gradient of a parameter has been applied, and may go.
        was_unused: whether no rank has used a parameter in that backward.
    """

    def __init__(
        self, context: StageContext, *, is_applied: Callable[[Tensor], bool], was_unused: Callable[[Tensor], bool]
    ) -> None:
        self.released: list[Tensor] = []
        """The parameters of which the last backward's gradients were released."""
        assert context.ddp is not None, "see check_releasable"
        self._ddp = context.ddp
        self._names = context.names or {}
        self._finds_unused = bool(context.finds_unused)
        self._is_applied = is_applied
        self._was_unused = was_unused
        # Between autograd's thread and the one that runs stages.
        self._lock = threading.Lock()
        self._memories: dict[int, BucketMemory] = {}
        self._by_parameter: dict[int, BucketMemory] = {}
        self._pass = _Pass.NONE
        self._kept_for_others: list[Tensor] = []
        self._hooks: list[Any] = []
        self._without_hook = list(self._names)
        self.before_forward()
        context.watch(self)

    def before_forward(self) -> None:
        """A forward begins; from now on its parameters may get gradients, also those that were frozen before."""
        ddp = self._ddp()
        if self._pass is _Pass.NONE and ddp is not None and ddp.require_backward_grad_sync:
            self._pass = _Pass.DUE
        alive = weakref.ref(self)
        for parameter in [parameter for parameter in self._without_hook if parameter.requires_grad]:
            self._hooks.append(parameter.register_hook(_told_of(id(parameter), alive)))
        self._without_hook = [parameter for parameter in self._without_hook if not parameter.requires_grad]

    def gradient_comes(self, parameter: int) -> None:
        """A gradient of the parameter of this ``id`` is about to be written."""
        if self._pass is _Pass.NONE and not self._may_synchronize:
            return
        is_first = self._pass in (_Pass.NONE, _Pass.DUE)
        if is_first:
            self._pass = _Pass.COMING
        memory = self._by_parameter.get(parameter)
        if is_first and self._finds_unused:
            with self._lock:
                self._fill(list(self._memories.values()))
        elif memory is not None and memory.is_empty:
            with self._lock:
                self._fill([memory])
        if memory is not None:
            memory.wait_until_filled()

    @property
    def _may_synchronize(self) -> bool:
        """Asked where no forward was seen that says so: one may have been called by ``ddp.forward(...)``."""
        ddp = self._ddp()
        return ddp is None or backward_may_synchronize(ddp)

    def arrived(self, bucket: Bucket, future: Future) -> None:
        """All gradients of ``bucket`` are there; DDP gets it back by ``future``."""
        with self._lock:
            if bucket.index == 0:
                self._begin()
            if not bucket.buffer.is_sparse:  # Otherwise the pass is going to fail.
                self._memory_of(bucket).note_arrival(bucket, future)
            if bucket.is_last:
                self._pass = _Pass.ENDING
                self._fill(list(self._memories.values()))

    def _begin(self) -> None:
        self.released = []
        self._kept_for_others = []
        self._pass = _Pass.COMING
        for memory in self._memories.values():
            memory.is_done = False

    def _memory_of(self, bucket: Bucket) -> BucketMemory:
        key = storage_key(bucket.buffer)
        memory = self._memories.get(key)
        if memory is None:
            for parameter in bucket.parameters:
                if (former := self._by_parameter.get(id(parameter))) is not None:
                    self._memories.pop(former.key, None)
            memory = self._memories[key] = BucketMemory(bucket, key)
            self._by_parameter.update((id(parameter), memory) for parameter in bucket.parameters)
        return memory

    def through(self, bucket: Bucket) -> None:
        """The stages are done with ``bucket``, which DDP gets back next."""
        if bucket.buffer.is_sparse:
            return
        memory = self._by_parameter[id(bucket.parameters[0])]
        with self._lock:
            self._empty_if_done(memory, bucket)

    def _empty_if_done(self, memory: BucketMemory, bucket: Bucket) -> None:
        if memory.is_of_others or any(not self._may_go(parameter, memory) for parameter in memory.parameters):
            return
        if (parameter := memory.used_elsewhere(bucket)) is not None:
            self._kept_for_others.append(parameter)
            return
        for parameter in memory.views():
            parameter.grad = None
        memory.is_done = True
        hold(bucket.buffer)
        if self._pass is not _Pass.ENDING:
            memory.empty()
        elif not has_streams(bucket.buffer.device):
            memory.empty()
            memory.fill()

    def _may_go(self, parameter: Tensor, memory: BucketMemory) -> bool:
        if self._is_applied(parameter):
            return True
        gradient = parameter.grad
        if gradient is None:
            return self._was_unused(parameter)  # If another rank has used it, DDP is going to set the mean.
        return storage_key(gradient) != memory.key

    def over(self, *, failed: bool) -> None:
        """Backward is over."""
        with self._lock:
            if failed:
                self._restore()
                return
            self._pass = _Pass.NONE
            for memory in [memory for memory in self._memories.values() if memory.is_done]:
                memory.is_done = False
                used = memory.used_elsewhere()
                for parameter in memory.views():
                    parameter.grad = None
                self.released += [parameter for parameter in memory.parameters if self._is_applied(parameter)]
                if used is None:
                    memory.empty()
                else:
                    self._kept_for_others.append(used)

    def refuse_use_elsewhere(self) -> None:
        """Raises: TrainingLoopError: the memory of a gradient was kept, because something else refers to it; once."""
        kept, self._kept_for_others = self._kept_for_others, []
        if kept:
            raise TrainingLoopError(
                f"the gradient of {self._names.get(kept[0], 'a parameter')} cannot be released, because something else "
                "refers to it, or to its bucket, and would read freed memory; the update has been made. Keep "
                "copies (.clone()) of gradients and buckets, or use release_gradients=False"
            )

    def remove(self) -> None:
        """The model trains on without: every bucket gets its memory back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._without_hook = [], []
        with self._lock:
            self._restore()
            self._memories, self._by_parameter = {}, {}

    def _restore(self) -> None:
        self._begin()
        self._pass = _Pass.DUE
        self._fill(list(self._memories.values()))

    def _fill(self, memories: list[BucketMemory]) -> None:
        for memory in memories:
            if memory.is_empty and memory.is_abandoned:
                self._memories.pop(memory.key, None)  # DDP has built its buckets anew.
            elif memory.is_empty:
                memory.fill()


def _told_of(parameter: int, alive: weakref.ref[GradientRelease]) -> Callable[[Tensor], None]:
    """A tensor hook. It holds no reference: a cycle through autograd's hooks could never be collected."""

    def comes(gradient: Tensor) -> None:
        if (release := alive()) is not None:
            release.gradient_comes(parameter)

    return comes
