"""Communicators of the library's own for tensors on devices that have streams.

They are made in one place, so that the tests can put simulated ones there (:func:`communicators_replaced`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._threads import start
from overlap._torch.c10d import AllgatherOptions, PrefixStore, Store, backend_name, group_store, group_timeout
from overlap._torch.device import current_stream, has_streams, new_event, synchronize
from overlap._torch.stores import BoundedStore
from overlap.errors import CollectiveError

__all__ = [
    "CommunicatorChannel",
    "Communicators",
    "can_have_communicator",
    "communicators_replaced",
    "keys_of_meeting",
    "meet",
]

_ASKING_S = (0.001, 0.1)
# A launch takes microseconds, unless it waits for ranks that do not come.
_LAUNCHING_S = 1.0
# How long a rank that issues nothing is taken to be busy.
_STALLED_S = 30.0
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


class Communicators:
    """NCCL's.

    [Note: no watchdog]

    PyTorch's watchdog ends the process where a collective fails, also when that is because another rank has aborted its
    communicator. So there is none here: a group that is made while ``TORCH_NCCL_BLOCKING_WAIT`` is set has none. The
    host does not wait all the same, since nobody calls a work's ``wait()``, only ``block_current_stream()``, which is
    ``synchronize()`` without its warning. What the watchdog would look for, :meth:`check` and
    :meth:`CommunicatorChannel.check` do.
    """

    def __init__(self) -> None:
        # The first work of each group made here: it has the communicator's errors, and keeps one element alive.
        self._probes: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()

    def can_make(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether the ranks of ``group`` can have another communicator for tensors on ``device``."""
        return backend_name(group, device) == "nccl" and hasattr(dist, "ProcessGroupNCCL")

    def make(self, group: dist.ProcessGroup, store: Store, device: torch.device) -> dist.ProcessGroup:
        """A process group of the ranks of ``group`` that nobody else uses; blocks until all are connected.

        Called by all of them, in the same order and when all are there; ``store`` is for this one alone. ``abort()``,
        from any thread, has all works in flight end, so that streams go on; ``shutdown()`` lets them finish.
        """
        nccl: Any = dist.ProcessGroupNCCL
        # Not every wrapper of a backend shows its options.
        own, options = getattr(group._get_backend(device), "options", None), nccl.Options()
        options._timeout = group_timeout(group, device)
        if isinstance(own, nccl.Options):
            options.is_high_priority_stream = own.is_high_priority_stream
            options.config = own.config
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        options.group_name = f"overlap of {group.group_name}"
        with _environment(_NO_WATCHDOG, "1"):
            backend = nccl(store, group.rank(), group.size(), options)
        # As init_process_group and new_group put a group together, but for registering it: they name a group after the
        # number of groups that the rank is in, which differs from rank to rank.
        kind = dist.ProcessGroup.BackendType.NCCL
        made = dist.ProcessGroup(store, group.rank(), group.size())
        made._set_default_backend(kind)
        made._register_backend(torch.device(device.type), kind, backend)
        made._set_group_desc("overlap")
        # Connects now, while all ranks are here: later, those that come would wait for one that has failed.
        probe = self._probes[made] = made.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions())
        self.wait(probe)
        return made

    def wait(self, work: Any) -> None:
        """Make the current stream wait for ``work``."""
        work.block_current_stream()

    def check(self, made: dist.ProcessGroup) -> None:
        """Raise where ``made`` has failed by itself, because the connection to another rank is broken, say."""
        if (probe := self._probes.get(made)) is not None:
            probe.wait()  # It is done, so this only looks for errors.


_communicators = Communicators()


@contextlib.contextmanager
def communicators_replaced(communicators: Communicators) -> Iterator[None]:
    """Within it, ``communicators`` makes them."""
    global _communicators
    before, _communicators = _communicators, communicators
    try:
        yield
    finally:
        _communicators = before


def can_have_communicator(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a :class:`CommunicatorChannel` to the ranks of ``group`` can be made for tensors on ``device``."""
    return has_streams(device) and _communicators.can_make(group, device)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Launched:
    """A work on a communicator. Whoever waits for it leaves a mark on the stream, by which a hang is found."""

    def __init__(self, work: Any, channel: CommunicatorChannel) -> None:
        self._work = work
        self._channel = channel

    def wait(self) -> bool:
        self._channel.wait(self._work)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


class CommunicatorChannel:
    """A communicator for the ranks of ``group`` that nobody else uses; every rank makes it, with the same ``key``.

    Args:
        group: whose ranks.
        key: what no other channel of the group has.
        device: where the tensors are.
        look: called while this rank waits for the others to come; may raise.

    Raises:
        CollectiveError: another rank did not come in time, or there is no room for a communicator, say.
    """

    scatters_by_messages = False

    def __init__(self, group: dist.ProcessGroup, key: str, device: torch.device, look: Callable[[], None]) -> None:
        self._size, self._rank = group.size(), group.rank()
        self._device = device
        self._timeout_s = group_timeout(group, device).total_seconds()
        self._communicators = _communicators
        store = meet(group, key, device, look)
        try:
            # Any: the type stubs lack some of a group's methods.
            self._communicator: Any = self._communicators.make(group, store, device)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self._rank} could not make a communicator on {device} besides the process group's own: "
                f"{error}; register(..., own_communicators=False) does without"
            ) from error
        self._launching = threading.Lock()
        self._ending: threading.Thread | None = None
        self._mark = new_event(device)
        self._marked_s = self._passed_s = 0.0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensor: Tensor, op: Any) -> list[Any]:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._launch(lambda group: group.allreduce([tensor], options))

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        return self._launch(lambda group: group._allgather_base(output, input, AllgatherOptions()))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[Any]:
        return self._launch(lambda group: group._reduce_scatter_base(output, input, dist.ReduceScatterOptions()))

    def broadcast(self, tensor: Tensor, src: int) -> list[Any]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        return self._launch(lambda group: group.broadcast([tensor], options))

    def send_recv(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> list[Any]:
        def exchange(group: Any) -> Any:
            # Together, or each would wait on the device for its own peer. As dist.batch_isend_irecv does.
            group._start_coalescing(self._device)
            for tensor, peer in receives:
                group.recv([tensor], peer, tag)
            for tensor, peer in sends:
                group.send([tensor], peer, tag)
            return group._end_coalescing(self._device)

        return self._launch(exchange) if sends or receives else []

    def _launch(self, launch: Callable[[Any], Any]) -> list[Any]:
        with self._launching:
            communicator = self._communicator
            if communicator is None:
                raise CollectiveError("this communicator was aborted")
            return [_Launched(launch(communicator), self)]

    def wait(self, work: Any) -> None:
        """Make the current stream wait for ``work``."""
        self._communicators.wait(work)
        self._mark.record(current_stream(self._device))
        self._marked_s = time.monotonic()

    def check(self) -> None:
        """Look whether the device still gets on, on any thread; see [Note: no watchdog].

        Raises:
            RuntimeError: the communicator has failed, or a collective takes longer than the group's timeout.
        """
        marked_s, now_s = self._marked_s, time.monotonic()
        # While the host comes by all is well. To query an event then could break the capture of a graph.
        if marked_s == self._passed_s or now_s - marked_s < min(_STALLED_S, self._timeout_s):
            return
        if self._mark.query():
            self._passed_s = marked_s
            return
        if (communicator := self._communicator) is not None:
            self._communicators.check(communicator)
        if now_s - marked_s > self._timeout_s:
            raise RuntimeError(f"a collective is not done after {now_s - marked_s:.0f} s")

    def abort(self) -> threading.Thread | None:
        """Have everything in flight end, unfinished; later calls raise. Returns the thread that does it.

        NCCL frees what a launch uses, so one that is under way is let through. One that waits for other ranks is not:
        to abort is what ends it.
        """
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return self._ending

        def run() -> None:
            is_idle = self._launching.acquire(timeout=_LAUNCHING_S)
            with contextlib.suppress(RuntimeError):
                communicator.abort()
            if is_idle:
                self._launching.release()

        self._ending = start(run, "overlap-abort")
        return self._ending

    def close(self) -> None:
        """Block until everything in flight is done, and give the communicator back."""
        if self._communicator is None:
            return
        synchronize(self._device)  # What waits for a rank that has ended can still be aborted here, but not below.
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with contextlib.suppress(RuntimeError):
                communicator.shutdown()


def keys_of_meeting(size: int) -> list[str]:
    """What :func:`meet` leaves in the store of a group of ``size`` ranks."""
    return ["came", "all came", *(f"came/{rank}" for rank in range(size))]


def meet(group: dist.ProcessGroup, key: str, device: torch.device, look: Callable[[], None]) -> Store:
    """Wait until all ranks of ``group`` have called this with the same ``key``; returns a store of their own.

    Raises:
        CollectiveError: another rank did not come within the group's timeout.
    """
    bounded, store = BoundedStore(group, f"overlap/{key}"), PrefixStore(f"overlap/{key}", group_store(group))
    timeout_s = group_timeout(group, device).total_seconds()

    def come(store: Store) -> None:
        store.set(f"came/{group.rank()}", "")
        if store.add("came", 1) == group.size():
            store.set("all came", "")

    def missing(store: Store) -> list[int]:
        return [rank for rank in range(group.size()) if not store.check([f"came/{rank}"])]

    bounded.within(timeout_s, come)
    deadline_s = time.monotonic() + timeout_s
    pause_s, longest_s = _ASKING_S
    # Not store.wait: other threads of this process could not use the store meanwhile.
    while not bounded.within(timeout_s, lambda store: store.check(["all came"])):
        look()
        if time.monotonic() > deadline_s:
            raise CollectiveError(
                f"rank {group.rank()} could not connect with the other ranks in {timeout_s:.0f} s: ranks "
                f"{bounded.within(timeout_s, missing)} did not come; "
                "every rank of the model's process group must register the same stages and run backward"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return store
