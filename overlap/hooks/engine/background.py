"""Work outside of a backward pass, such as averaging or gathering parameters while training goes on."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from overlap._torch.device import current_stream, has_streams, recorded_event
from overlap._torch.profiling import label_type
from overlap.hooks.collectives import Operation
from overlap.hooks.context import Background
from overlap.hooks.engine.executors import Executor, Subject
from overlap.hooks.engine.wavefront import Part, Task

__all__ = ["BETWEEN_PASSES", "Completion", "Item", "run_and_wait", "run_items", "run_now"]

BETWEEN_PASSES = "background"
"""The label of background work, in the place of a stage's."""

# While one packs or unpacks, the other communicates; more would only take more memory.
_IN_PROGRESS = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Item:
    """One piece of background work, as profiles and error messages name it. A bucket can be used as well."""

    index: int
    step: int = -1
    """The backward pass that it belongs to; -1 where it belongs to none."""

    def describe(self) -> str:
        """The item's name in error messages."""
        return f"part {self.index}"


T = TypeVar("T", bound=Subject)
Work = Callable[[T], Coroutine[Operation, Any, None]]


def run_items(items: Sequence[T], work: Work[T], executor: Executor) -> None:
    """Run ``work(item)`` for each of ``items`` to the end, two items at a time.

    The order of collectives depends only on the order of items: an item's first collective is launched after the first
    of the item before, and before the others of that item.
    """
    active: deque[Task] = deque()
    parts, labelled = [Part(BETWEEN_PASSES, work)], label_type()
    try:
        with executor.scope():
            for item in items:
                task = Task(item, item, parts, executor, labelled=labelled)
                active.append(task)
                task.advance()
                if len(active) == _IN_PROGRESS:
                    _finish(active)
            while active:
                _finish(active)
    except BaseException:
        for task in active:
            task.close()
        raise


def _finish(active: deque[Task]) -> None:
    while not active[0].is_done:
        active[0].advance()
    active.popleft()


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
    """``error`` to be raised, while the original is kept.

    What is raised gets the frames of all callers, which hold the model. Whoever keeps it beside a stage would keep the
    model, its thread and its connections: DDP holds the stage where the garbage collector does not look.
    """
    try:
        made = copy.copy(error)
    except Exception:
        return error
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        made.__notes__ = list(notes)
    return made.with_traceback(error.__traceback__)


def run_and_wait(background: Background, items: Sequence[T], work: Work[T], device: torch.device) -> None:
    """Run ``work`` on each of ``items`` with a runtime's ``background``; the current stream may use the results.

    A failure is reported to the other ranks, which would otherwise wait for this one.
    """
    completions = {item: Completion(device) for item in items}

    async def completed(item: T) -> None:
        await work(item)
        completions[item].set()

    def fail(error: BaseException) -> None:
        for completion in completions.values():
            completion.fail(error)

    background(items, completed, on_failure=fail)
    for completion in completions.values():
        completion.wait()
