"""Autograd's end-of-backward callbacks, the modes in which its hooks run, and its profiler's labels.

Private, all of it: there is no public way to ask, and the engine's queue has no public name (FSDP uses it too).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import finalize

import torch
from torch.autograd import profiler

# The context variables of the caller of backward, which PyTorch keeps there for code that backward compiles.
_CONTEXT = "context"

_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return list(map(_version_of, tensors))


# Modes.


@contextmanager
def without_saved_context() -> Iterator[None]:
    """Within it a collective that the calling thread issues in a backward pass holds nothing of Python's.

    [Note: works without Python objects]

    In backward PyTorch keeps a Python object in the thread's state, and each work of Gloo has a copy of that state.
    Gloo's own thread lets go of a work after it has told whoever waits for it; if it is the last to do so, it needs the
    interpreter's lock for that object. If the process group is destroyed at that moment by a thread that has the lock
    and waits for Gloo's, both wait forever; if the interpreter is going, the process aborts. So a collective of a
    backward is issued without that object, and callbacks in Python are not given to Gloo's futures.
    """
    if not torch._C._is_key_in_tls(_CONTEXT):
        yield
        return
    saved = torch._C._get_obj_in_tls(_CONTEXT)
    torch._C._remove_obj_from_tls(_CONTEXT)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_CONTEXT, saved)


def run_as_step(job: Callable[[], None], device_type: str) -> None:
    """Call ``job`` as an optimizer's step runs, without autocast and recording no gradients. Hooks of autograd have the
    modes that were set where backward was called.

    It is called for each bucket: contexts of generators would take longer than a whole collective's launch."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device_type):
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            job()
    else:
        job()


def run_without_saved_context(job: Callable[[], None], device_type: str) -> None:
    """:func:`run_as_step`, :func:`without_saved_context`: that takes as long as the launch of a collective."""
    saved: Any = None
    if torch._C._is_key_in_tls(_CONTEXT):
        saved = torch._C._get_obj_in_tls(_CONTEXT)
        torch._C._remove_obj_from_tls(_CONTEXT)
    try:
        run_as_step(job, device_type)
    finally:
        if saved is not None:
            torch._C._stash_obj_in_tls(_CONTEXT, saved)


# Where the calling thread is.

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs on the calling thread; -1 outside of any."""


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass. A joined rank runs hooks outside of any."""
    return backward_id() != -1


def in_end_of_backward() -> bool:
    """Whether the calling thread runs a callback queued for the end of a backward pass, and no node of its graph."""
    return in_backward() and torch._C._current_autograd_node() is None


def is_inside_of_another() -> bool:
    """At the end of a backward pass: whether a node of another one has started it, which then goes on; reentrant
    checkpoints do."""
    return torch._C._current_autograd_node() is not None


def before_accumulation(parameter: torch.Tensor, hook: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``hook`` before a backward pass adds to ``parameter.grad``; returns a function that undoes this."""
    handle = torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(hook)
    return handle.remove


# The end of backward.


def _watched(callback: Callable[[], None], if_dropped: Callable[[], None]) -> Callable[[], None]:
    """Calls ``callback``; where the engine drops it without a call, ``if_dropped`` is called instead.

    Not by ``__del__``, which would run in every pass: Python ignores an exception that a signal handler, such as one
    that raises ``SystemExit``, raises in a destructor.
    """

    def call() -> None:
        dropped.detach()
        callback()

    dropped = finalize(call, if_dropped)
    dropped.atexit = False
    return call


def if_abandoned(callback: Callable[[], None]) -> None:
    """Run ``callback`` if the current backward pass ends with an error, before ``backward()`` raises that.

    The engine calls its queue when a pass has computed its last gradient; a pass that ends with an error only drops
    it. So ``callback`` runs in a finalizer. It may block there, and must, until no stage uses the pass any more: the
    loop, which catches the error, may then change parameters and give gradients back. That is bounded: whoever waits
    for another rank polls the board, on which ``callback`` has reported, and else the connections' timeout ends it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_watched(lambda: None, callback))


def after_gradients(callback: Callable[[], None]) -> None:
    """Run ``callback`` on this thread once the current backward pass has computed its last gradient.

    If queued before the last bucket's hook is called, it runs before DDP's finalization, which waits for the buckets.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def after_backward(callback: Callable[[], None], *, if_dropped: Callable[[], None] = lambda: None) -> None:
    """Run ``callback`` on this thread once the current backward pass, including DDP's finalization, is over.

    If the callback of another model has raised, the engine drops ``callback``, and ``if_dropped`` is run instead.

    ``backward()`` raises an error of ``callback``. Callbacks run in the order in which they were queued, and DDP queues
    its finalization when the hook of the last bucket returns. So a callback queued by the hook runs *before* DDP's, and
    an exception in it would leave the reducer half finished; a callback queued by that callback runs after DDP's.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(_watched(callback, if_dropped)))


def after_all_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the callbacks of :func:`after_backward` have run, too; called from a hook of a gradient."""
    after_backward(lambda: after_gradients(callback))


# Profiles.

LabelType = Callable[[str], AbstractContextManager[Any]]

# It costs a fortieth of record_function where no profiler runs. Where one does, it shows an operator and not an
# annotation, for which a GPU has a row of its own.
_fast: LabelType = torch._C._profiler._RecordFunctionFast


def label_type() -> LabelType:
    """Gives code a label in profiles, as an annotation of the user's: ``with label_type()(name): ...``.

    Where a profiler was started from outside of Python, it shows the label as an operator.
    """
    return profiler.record_function if profiler._is_profiler_enabled else _fast


def profile(**options: Any) -> torch.profiler.profile:
    """``torch.profiler.profile(**options)`` that records all threads, also the library's own.

    PyTorch's profiler follows the thread that starts it and those of autograd. Stages of CPU tensors have a thread of
    the library's, which Python cannot let take part. On CUDA stages run on autograd's thread and are shown without it.

    >>> with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
    ...     _ = torch.ones(2).add(1)
    >>> "aten::add" in {event.name for event in recorded.events()}
    True
    """
    config: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config, **options)
