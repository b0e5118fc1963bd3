"""Gloo backends among processes that need not be in a process group, and any of which may vanish."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlap._threads import start
from overlap._torch.c10d import PrefixStore, Store
from overlap._torch.gloo import start_abort
from overlap._torch.stores import own_connection

__all__ = ["GlooLink"]


class GlooLink:
    """Connections between ``size`` processes, which are made in the background: see :meth:`is_connected`.

    Nothing here waits, since a process may wait in vain: whoever calls looks meanwhile whether all are still there.
    Ends with :meth:`close`.

    Args:
        store: where the processes find each other.
        key: what no other link in the store has.
        rank: of this process.
        size: how many there are.
        connect_timeout_s: after so long connecting has failed.
        timeout_s: after so long a collective has.
    """

    def __init__(
        self, store: Store, key: str, rank: int, size: int, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._changing = threading.Lock()
        self._backend: Any = None  # The type stubs lack a backend's collectives.
        self._error: RuntimeError | None = None
        self._is_closed = False
        self._in_flight: list[dist.Work] = []

        def connect() -> None:
            try:
                # Its own, since others are waited for in the store, where this process counts meanwhile.
                own = PrefixStore(key, own_connection(store))
                backend = dist.ProcessGroupGloo(own, rank, size, timeout=timedelta(seconds=connect_timeout_s))
            except RuntimeError as error:
                self._error = error
                return
            with self._changing:
                self._backend = backend
            del backend
            if self._is_closed:
                self._abort([])

        start(connect, "overlap-connect")

    def is_connected(self) -> bool:
        """Whether all are connected.

        Raises:
            RuntimeError: that has failed.
        """
        if self._error is not None:
            raise self._error
        return self._backend is not None

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin the sum of ``tensor`` over all, in place."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        return self._noted(self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to give the first process's ``tensor`` to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        return self._noted(self._backend.broadcast([tensor], options))

    def _noted(self, work: dist.Work) -> dist.Work:
        self._in_flight = [*(one for one in self._in_flight if not one.is_completed()), work]
        return work

    def close(self) -> None:
        """Close the connections. What is in flight keeps its tensors until it has failed."""
        self._is_closed = True
        in_flight, self._in_flight = self._in_flight, []
        self._abort(in_flight)

    def _abort(self, in_flight: Sequence[dist.Work]) -> None:
        with self._changing:
            backend, self._backend = self._backend, None
        if backend is not None:
            start_abort([backend], in_flight)
