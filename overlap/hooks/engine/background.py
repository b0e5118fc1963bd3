"""Work outside of a backward pass, such as averaging or gathering parameters during training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from overlap._torch.autograd import label_type
from overlap._torch.device import current_stream, has_streams, recorded_event
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation
from overlap.hooks.engine.executors import Executor
from overlap.hooks.engine.wavefront import StageRun, Task

__all__ = ["BETWEEN_PASSES", "Completion", "Item", "Subject", "run_items", "run_now"]

BETWEEN_PASSES = "background"
"""The label of background work, where a bucket has that of a stage."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Item:
    """One piece of background work, as profiles and error messages name it. A bucket can be used as well."""

    index: int
    step: int = -1
    """The backward pass that it belongs to; -1 where it belongs to none."""

    def describe(self) -> str:
        """The item's name in error messages."""
        return f"part {self.index}"


Subject = Bucket | Item
"""A task works on one of these."""
T = TypeVar("T", bound=Subject)
Work = Callable[[T], Coroutine[Operation, Any, None]]


def run_items(items: Sequence[T], work: Work[T], executor: Executor) -> None:
    """Run ``work(item)`` for each of ``items`` to the end, two items at a time: while one packs or unpacks, the other
    communicates.

    The order of collectives depends only on the order of items: an item's first collective is launched after the first
    of the item before, and before the others of that item.
    """
    active: list[Task] = []
    runs, labelled = [StageRun(BETWEEN_PASSES, work)], label_type()
    try:
        with executor.scope():
            for item in [*items, None]:
                if item is not None:
                    active.append(Task(item, item, runs, executor, labelled=labelled))
                    active[-1].advance()
                while len(active) > (0 if item is None else 1):
                    while not active[0].is_done:
                        active[0].advance()
                    del active[0]
    except BaseException:
        for task in active:
            task.close()
        raise


@torch.no_grad()
def run_now(items: Sequence[T], work: Work[T], executor: Executor) -> None:
    """:func:`run_items` on the calling thread; the current stream may use the results."""
    executor.begin()
    try:
        run_items(items, work, executor)
    finally:
        executor.join()  # After a failure, too: what was queued before it uses the tensors.


class Completion:
    """An event for background work: :meth:`set` where the work runs, :meth:`wait` where its result is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_set = threading.Event()
        self._event: Any = None
        self._error: BaseException | None = None

    def set(self) -> None:
        """The work is done; on an accelerator, when the current stream has finished what is queued so far."""
        if has_streams(self._device):
            self._event = recorded_event(self._device)
        self._is_set.set()

    def fail(self, error: BaseException) -> None:
        """The work has failed, unless it is done already: :meth:`wait` raises ``error``."""
        if not self._is_set.is_set():
            self._error = error
            self._is_set.set()

    def wait(self) -> None:
        """Block until the work is done; on an accelerator the current stream waits, not the host."""
        self._is_set.wait()
        if self._error is not None:
            raise _copied(self._error)
        if self._event is not None:
            current_stream(self._device).wait_event(self._event)


def _copied(error: BaseException) -> BaseException:
    """``error`` to be raised, while the original is kept: the one that is raised gets the frames of all callers, which
    hold the model, and DDP holds stages where the garbage collector does not look."""
    try:
        made = copy.copy(error)
    except Exception:
        return error
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        made.__notes__ = list(notes)
    return made.with_traceback(error.__traceback__)
