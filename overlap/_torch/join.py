"""What PyTorch's own code asks of a joinable, and DDP's forward and backward under a Join.

Private, all of it: names of DDP's own code for joining, which has no public way in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from overlap._torch.c10d import GradBucket, bucket_gradients

# How long to wait for a bucket before polling whether another rank has failed.
_POLL_INTERVAL_S = 1.0
# Overridden in an instance while a Join is active: what DDP asks all ranks where the Join knows the answer.
_FIND_COMMON_RANK = "_find_common_rank"
_CHECK_GLOBAL_SYNC = "_check_global_requires_backward_grad_sync"


# Joinables.


class _NotifyingConfig:
    """Takes the place of the configuration that PyTorch's ``Join`` gives a joinable.

    DDP, PyTorch's sharded optimizer and other joinables call PyTorch's static ``Join.notify_join_context(self)``, which
    asks this object once per call whether the joinable is the first of its Join. Being asked is the notification; the
    answer is always no, since only the first joinable issues PyTorch's collectives.
    """

    enable = True
    throw_on_early_termination = False

    def __init__(self, on_notify: Callable[[], None]) -> None:
        self._on_notify = on_notify

    @property
    def is_first_joinable(self) -> bool:
        self._on_notify()
        return False


def on_notify(joinable: Joinable, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` whenever ``joinable`` notifies its Join; returns a function that undoes this."""
    before = joinable._join_config
    config: Any = _NotifyingConfig(callback)
    joinable._join_config = config

    def undo() -> None:
        joinable._join_config = before

    return undo


def is_joining(joinable: Joinable) -> bool:
    """Whether ``joinable`` is inside of a ``Join``, overlap's or PyTorch's."""
    return bool(joinable._join_config.enable)


def leads_torch_join(joinable: Joinable) -> bool:
    """Whether ``joinable`` is the first in the list of PyTorch's ``Join``, whose collectives it then issues."""
    config = joinable._join_config
    return bool(config.enable) and not isinstance(config, _NotifyingConfig) and bool(config.is_first_joinable)


def torch_join_divides_by_count(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` is in PyTorch's ``Join`` with ``divide_by_initial_world_size=False``, which hooks do not see."""
    config = ddp._join_config
    return bool(config.enable) and not isinstance(config, _NotifyingConfig) and not ddp._divide_by_initial_world_size


# DDP.


def used_in_shadow(ddp: DistributedDataParallel) -> set[int] | None:
    """The parameters, by ``id``, that a rank used in the backward that PyTorch's ``Join`` has just shadowed on this
    rank; ``None`` where DDP does not look."""
    if not ddp.find_unused_parameters or ddp.static_graph:
        return None
    trained, _ = ddp._build_params_for_reducer()
    counts = ddp.reducer._get_local_used_map().tolist()
    return {id(parameter) for parameter, count in zip(trained, counts, strict=True) if count}


class _Count(Work):
    """For DDP's reducer: completed work whose result, the number to divide by, is computed when it is asked for."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count = count

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([torch.tensor([self._count()], device="cpu")])
        return future


class JoinedDDP:
    """A model under a Join."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._count: _Count | None = None
        # By id, in the reducer's order. Asked for in advance: to look parameters up waits for gathers under way, and
        # those wait for the other ranks.
        self._trained: list[int] = []

    def enter(self, buffer_source: Callable[[], int], before_module: Callable[[], None]) -> None:
        """Answer what DDP would ask all ranks by a collective.

        Args:
            buffer_source: gives the rank whose buffers the others take over.
            before_module: called in each forward, when DDP is about to call the wrapped module.
        """
        if self._ddp.find_unused_parameters:
            self._trained = [id(parameter) for parameter in self._ddp._build_params_for_reducer()[0]]
        setattr(self._ddp, _FIND_COMMON_RANK, lambda rank, condition: buffer_source())
        # Only PyTorch's joined ranks use what DDP finds out by this collective.
        setattr(self._ddp, _CHECK_GLOBAL_SYNC, lambda is_joined_rank: before_module())

    def leave(self) -> None:
        """Let DDP ask all ranks again."""
        for name in (_FIND_COMMON_RANK, _CHECK_GLOBAL_SYNC):
            vars(self._ddp).pop(name, None)
        if self._count is not None:
            self._ddp.reducer._set_forward_pass_work_handle(self._count, True)

    def divide_by(self, count: Callable[[], int]) -> None:
        """Let DDP's own reduction, where no hook is registered, divide by ``count()`` in the next backward.

        This object keeps what is given to the reducer: C++ calls methods of the Python object.
        """
        if self._count is None:
            self._count = _Count(count)
        self._ddp.reducer._set_forward_pass_work_handle(self._count, False)

    @property
    def hook_name(self) -> str | None:
        """The name of the communication hook that was registered, if any."""
        if not self._ddp._comm_hooks:
            return None
        return str(getattr(self._ddp._comm_hooks[-1][0], "__qualname__", "a hook"))

    @property
    def may_rebuild(self) -> bool:
        """Whether the next forward may rebuild the buckets, which takes a broadcast."""
        return not self._ddp._has_rebuilt_buckets

    @property
    def has_buffer_hook(self) -> bool:
        """Whether a hook of the user synchronizes the buffers."""
        return hasattr(self._ddp, "buffer_hook")

    def _rebuild(self) -> None:
        if self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets = True

    @torch.no_grad()
    def replay_forward(self, *, records_gradients: bool, buffers_from: int | None, synchronizes: bool) -> None:
        """Issue the collectives of a forward that the other ranks run."""
        if records_gradients:
            self._rebuild()
        if buffers_from is not None:
            self._ddp._assign_modules_buffers()
            self._ddp._sync_module_buffers(buffers_from)
        self._ddp.require_forward_param_sync = synchronizes

    @torch.no_grad()
    def replay_backward(self, *, poll: Callable[[], None], own_gradients_by: int | None = None) -> None:
        """Issue the collectives of a backward that the other ranks run; ``.grad`` then holds the mean of gradients.

        This rank contributes zeros, or with ``own_gradients_by`` what is in ``.grad``, which DDP's own reduction
        divides by that number. While it waits, it calls ``poll`` about once a second, which raises where another rank
        has failed.
        """
        ddp = self._ddp
        self._rebuild()
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        own: set[int] = set()
        if own_gradients_by is not None:
            own = _fill(buckets, 1 if ddp._comm_hooks else own_gradients_by)
        for bucket, future in [(bucket, ddp.reducer._run_comm_hook(bucket)) for bucket in buckets]:
            result = _result(future, poll)
            reduced = result[0] if isinstance(result, (list, tuple)) else result
            if reduced.data_ptr() != bucket.buffer().data_ptr() or reduced.dtype != bucket.buffer().dtype:
                bucket.buffer().copy_(reduced.view_as(bucket.buffer()))
        used = self._used_on_any_rank(own)
        for bucket in buckets:
            for parameter, gradient in zip(bucket.parameters(), bucket_gradients(bucket), strict=True):
                if used is not None and id(parameter) not in used:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad.copy_(gradient)
        # Needed once: the next forward rebuilds the buckets in the order in which gradients came.
        ddp.reducer._push_all_rebuilt_params()
        ddp.require_forward_param_sync = True

    def _used_on_any_rank(self, own: set[int]) -> set[int] | None:
        """The parameters, by ``id``, that a rank used; on this one ``own``. ``None`` where DDP does not look."""
        ddp = self._ddp
        if not ddp.find_unused_parameters or ddp.static_graph:
            return None
        used = ddp.reducer._get_local_used_map()
        # It still holds what the last pass found.
        used.copy_(torch.tensor([each in own for each in self._trained], device="cpu"))
        dist.all_reduce(used, group=ddp.process_group)
        return {each for each, count in zip(self._trained, used.tolist(), strict=True) if count}


def _fill(buckets: Sequence[GradBucket], divisor: int) -> set[int]:
    """Fill ``buckets`` with ``.grad`` divided by ``divisor``; returns the parameters that have one, by ``id``."""
    own: set[int] = set()
    for bucket in buckets:
        for parameter, gradient in zip(bucket.parameters(), bucket_gradients(bucket), strict=True):
            if parameter.grad is not None:
                own.add(id(parameter))
                torch.mul(parameter.grad, 1 / divisor, out=gradient)
    return own


def _result(future: torch.futures.Future[Any], poll: Callable[[], None]) -> Any:
    """As ``future.wait()``; calls ``poll`` now and then."""
    is_done = threading.Event()
    if not future.done():
        future.add_done_callback(lambda _: is_done.set())
        while not is_done.wait(_POLL_INTERVAL_S):
            poll()
    return future.wait()
