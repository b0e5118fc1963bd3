"""Where a stage's code runs, and what it means there to wait for a collective.

[Note: small models]

A worker thread lets the stages of one bucket run while autograd computes the next. That takes a hand-over from thread
to thread for each bucket, and the interpreter's lock goes to and fro. Where a model is so small that all of it takes
less time than that, or has a single bucket, which comes when nothing is left to compute, its stages run on autograd's
thread, in the same order. The limit is the size of DDP's first bucket, which is sent at once anyhow.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import refuse_capture
from overlap._torch.ddp import has_one_bucket, trained_parameters
from overlap._torch.device import current_stream, has_streams, on_stream, stream_of
from overlap._torch.gloo import has_lost_connection
from overlap.errors import CollectiveError
from overlap.hooks.collectives import Operation
from overlap.hooks.engine.channels import GroupChannels, PrivateChannels
from overlap.hooks.engine.observer import Observer
from overlap.join.board import explained
from overlap.join.group_collectives import failures_explained

__all__ = [
    "Executor",
    "Executors",
    "HostExecutor",
    "StreamExecutor",
    "executor_for",
    "is_small",
    "limit_replaced",
    "runs_inline",
]

# Others wait for what runs here, while what the training stream computes meanwhile has time: a message leaves earlier
# if it need not be encoded behind the blocks of a large kernel. FSDP2's streams of copies have the same.
_PRIORITY = -1

_small_bytes = 2**20

# How long a thread waits for a collective before it checks whether another rank has reported a failure.
_PATIENCE = timedelta(seconds=1)


@contextlib.contextmanager
def limit_replaced(limit_bytes: int) -> Iterator[None]:
    """Within it a model of at most so many bytes is small; with 0 none is."""
    global _small_bytes
    before, _small_bytes = _small_bytes, limit_bytes
    try:
        yield
    finally:
        _small_bytes = before


def is_small(trained_bytes: int, *, has_one_bucket: bool) -> bool:
    """Whether a model with so many bytes of trainable parameters is small. See [Note: small models]."""
    return _small_bytes > 0 and (has_one_bucket or trained_bytes <= _small_bytes)


def runs_inline(ddp: DistributedDataParallel) -> bool:
    """Whether stages of this model on CPU tensors run on autograd's thread."""
    return is_small(sum(parameter.nbytes for parameter in trained_parameters(ddp)), has_one_bucket=has_one_bucket(ddp))


class Executor:
    """A place where code runs, one piece after another; here, that is where it is called."""

    def __init__(self, channels: GroupChannels | PrivateChannels) -> None:
        self.channels = channels
        self.observer: Observer | None = None

    def begin(self) -> None:
        """Let what follows in the scope start after what the caller has done so far."""

    def scope(self) -> AbstractContextManager[Any]:
        """The context for the code that runs here."""
        return nullcontext()

    def wait(self, work: dist.Work) -> None:
        """Make what follows in the scope wait for ``work``."""
        work.wait()

    def leave(self, operation: Operation) -> None:
        """Make what follows in the scope wait for an operation in flight of which nobody wants the result."""
        # This is for the buffers alone: an operation that has failed is done with them.
        with contextlib.suppress(RuntimeError):
            operation.abandon(self.wait)

    def join(self) -> None:
        """Make what the caller does next wait for what has run in the scope so far."""

    def launch(self, operation: Operation) -> None:
        """Start ``operation``; returns at once."""
        operation.launch(self.channels)


class HostExecutor(Executor):
    """For CPU tensors: to wait is to block the thread, and to look whether another rank has failed."""

    def wait(self, work: dist.Work) -> None:
        board = self.channels.board
        if board is None:
            with failures_explained():
                work.wait()
            return
        start_s = time.monotonic()
        while True:
            is_over = work.is_completed()  # Asked before: it may be done a moment after the patience has ended.
            try:
                if is_over:
                    work.wait()
                else:
                    work.wait(_PATIENCE)
                return
            except RuntimeError as error:
                if is_over:
                    raise explained(error, f"failed after {time.monotonic() - start_s:.1f} s", board) from error
                board.poll()
                self.look()

    def look(self) -> None:
        """Called now and then while a collective is not done, and raises where it will not be."""

    def leave(self, operation: Operation) -> None:
        """Does nothing: another rank may not come. The connections are closed, which ends what is in flight."""

    def launch(self, operation: Operation) -> None:
        """Start ``operation``; returns at once.

        Raises:
            CollectiveError: it cannot be started, since another rank has failed.
        """
        try:
            super().launch(operation)
        except RuntimeError as error:
            board = self.channels.board
            if board is not None and (cause := board.peer_error()) is not None:
                raise cause from error
            if isinstance(error, CollectiveError) or not has_lost_connection(error):
                raise
            raise explained(error, "could not be launched") from error


class StreamExecutor(Executor):
    """For accelerator tensors: a side stream; to wait is to make that stream wait, never the host.

    [Note: one stream]

    All that runs for a model runs on one stream, in the order in which it is called, and so pieces wait for each other
    without events. Nothing comes too late by that. Collectives of one group run in the order of their launch,
    and the scheduler waits for them in that order, for each only when the next one has been launched: while the stream
    waits for one or works on its result, the network has the next. What a stage allocates belongs to the stream, and a
    work keeps its tensors alive until it is waited for; bucket buffers and parameters outlive the pass. More in
    ``docs/notes/streams.md``.

    Args:
        channels: what carries the collectives.
        device: that of the tensors.
        owner: whose side stream it is; this executor's own where ``None``. It is made on first use.
    """

    def __init__(
        self, channels: GroupChannels | PrivateChannels, device: torch.device, *, owner: object | None = None
    ) -> None:
        super().__init__(channels)
        self._device = device
        self._owner = self if owner is None else owner
        self._stream: Any | None = None

    def begin(self) -> None:
        """Let the stream go on after what the current stream has queued: in backward, the gradients."""
        if self._stream is None:
            self._stream = stream_of(self._owner, self._device, priority=_PRIORITY)
        self._stream.wait_stream(current_stream(self._device))

    def scope(self) -> AbstractContextManager[Any]:
        return on_stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)


def executor_for(group: dist.ProcessGroup, device: torch.device) -> Executor:
    """An executor whose collectives run on ``group`` itself, for one call on the calling thread.

    On an accelerator all calls on one group share a stream, on which they run in order.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    refuse_capture("an average or another call of several collectives", "call it outside of the capture", device)
    channels = GroupChannels(group)
    if not has_streams(device):
        return HostExecutor(channels)
    return StreamExecutor(channels, device, owner=group)


class Executors:
    """Where what belongs to one model runs: all in one place on the host, on a side stream on an accelerator.

    [Note: the first pass]

    In DDP's first pass one bucket has the gradients of the whole model (one for each dtype); the second pass has the
    others. A side stream would keep workspace as large as the model, since the caching allocator has a pool for each
    stream. So the first pass, and gathers that belong to it, run on the stream that they are called on: its pool serves
    the next forward.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.channels: GroupChannels | PrivateChannels = GroupChannels(group)
        self._aside: Executor
        self._for_caller: Executor
        if has_streams(device):
            self._aside, self._for_caller = StreamExecutor(self.channels, device), Executor(self.channels)
        else:
            if PrivateChannels.can_serve(group):
                self.channels = PrivateChannels(group)
            self._aside = self._for_caller = HostExecutor(self.channels)

    def of(self, step: int) -> Executor:
        """For what belongs to backward pass number ``step``, or to none (-1). See [Note: the first pass]."""
        return self._for_caller if step == 0 else self._aside

    @property
    def observer(self) -> Observer | None:
        """Is told of everything that runs, if set."""
        return self._aside.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._aside.observer = self._for_caller.observer = observer
