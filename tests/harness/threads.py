"""Ranks as threads of this process: for combinations that are too many for processes.

Collectives complete before they return, so threads cannot show a missing wait or a race; what runs here must
also run in processes. Ranks share torch's global random generator: use one of your own.

Private API, all of it here:
- `multi_threaded_pg`: the process group whose ranks are threads, which nothing public offers;
- `_set_thread_isolation_mode`: gives each thread its own registry of group names, which would clash;
- `_C._is_multithreading_enabled`: to put back what `_install_threaded_pg` turns off in the calling thread,
  which not every version of it does.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from .errors import RankFailed, RankHung

_POLL_S = 0.02


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 30,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` in `world_size` threads and returns the results by rank.

    The default group is a threaded one, for CPU tensors; DDP works on it, also in threads that `fn` starts.
    Arguments are shared between the ranks: copy what a rank changes.

    Raises `RankFailed` for the first rank that raised, `RankHung` with every rank's stack when `timeout_s` is
    over.
    """
    with _threaded_world():
        store = dist.HashStore()
        ranks = [_Rank(rank, world_size, store, fn, args, timeout_s) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        failure = _join(ranks, timeout_s)
    if failure is not None:
        raise failure from getattr(failure, "exception", None)
    return [rank.result for rank in ranks]


class _Rank(threading.Thread):
    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
    ) -> None:
        super().__init__(name=f"rank{rank}", daemon=True)
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.call = (fn, args)
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.result: Any = None
        self.error: BaseException | None = None
        self.failed_at_s = float("inf")

    def run(self) -> None:
        fn, args = self.call
        try:
            dist.init_process_group(
                "threaded",
                rank=self.rank,
                world_size=self.world_size,
                store=self.store,
                timeout=self.timeout,
            )
            self.result = fn(self.rank, self.world_size, *args)
            dist.destroy_process_group()
        except BaseException as error:
            self.error = error
            self.failed_at_s = time.monotonic()


def _join(ranks: list[_Rank], timeout_s: float) -> RankFailed | RankHung | None:
    """Waits for the ranks; after a failure it releases those that wait in a collective for the failed one."""
    deadline = time.monotonic() + timeout_s
    while any(rank.is_alive() for rank in ranks):
        for rank in ranks:
            rank.join(_POLL_S)
        late = time.monotonic() > deadline
        if late and not any(rank.error for rank in ranks):
            return _hung(ranks, timeout_s)
        if late and time.monotonic() > deadline + 5:
            break  # a rank has failed, and one that does not end when it is released is not worth the wait
        if any(rank.error for rank in ranks):
            _release()
    failed = sorted((rank for rank in ranks if rank.error), key=lambda rank: rank.failed_at_s)
    if not failed:
        return None
    first = failed[0]
    assert first.error is not None
    text = "".join(traceback.format_exception(first.error)).rstrip()
    return RankFailed(first.rank, f"rank {first.rank} raised\n\n{text}", first.error)


def _hung(ranks: list[_Rank], timeout_s: float) -> RankHung:
    alive = [rank for rank in ranks if rank.is_alive()]
    frames = sys._current_frames()
    stacks = [
        f"--- stack of rank {rank.rank} ---\n" + "".join(traceback.format_stack(frames[rank.ident]))
        for rank in alive
        if rank.ident in frames
    ]
    _release()
    for rank in alive:
        rank.join(1)
    blamed = alive[0].rank
    return RankHung(blamed, "\n".join([f"rank {blamed} had no result after {timeout_s:g} s", *stacks]))


def _release() -> None:
    group = threaded.ProcessLocalGroup
    group._terminate.set()
    with group._coll_lock:
        collectives = list(group._cur_coll_on_pgs.values())
    for collective in collectives:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


@contextmanager
def _threaded_world() -> Iterator[None]:
    if isinstance(dist.distributed_c10d._world, threaded.ThreadLocalWorld):
        raise RuntimeError("run_threads cannot be nested")
    multithreading = torch._C._is_multithreading_enabled()
    start = threading.Thread.start
    torch_threads = torch.get_num_threads()
    # As in a rank's process: two threads would add up in another order, and the ranks share the cores anyway.
    torch.set_num_threads(1)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded.ProcessLocalGroup.reset()
    threaded._install_threaded_pg()
    threading.Thread.start = _start_in_the_world_of_its_rank(start)  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch.autograd.set_multithreading_enabled(multithreading)
        torch.set_num_threads(torch_threads)


def _start_in_the_world_of_its_rank(
    start: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    """A thread that a rank starts belongs to that rank; PyTorch would give it an empty world of its own."""
    local = threaded.ThreadLocalWorld._world

    def start_with_world(thread: threading.Thread) -> None:
        world = getattr(local, "world", None)
        if world is not None and not isinstance(thread, _Rank):
            run = thread.run

            def run_in_world() -> None:
                local.world = world
                run()

            thread.run = run_in_world  # type: ignore[method-assign]
        start(thread)

    return start_with_world
