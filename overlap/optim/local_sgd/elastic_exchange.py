"""How the processes of a view average, and how newcomers are given the model."""

from __future__ import annotations

import collections
import io
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import Store
from overlap._torch.gloo import has_lost_connection
from overlap._torch.gloo_links import GlooLink
from overlap.join.views import Agreement, Limits, View

__all__ = ["ElasticExchange"]

# Few at a time: one that waits for others takes up its timeout.
_IN_FLIGHT = 2
_PIECE_BYTES = 64 * 2**20


class ElasticExchange:
    """What the processes of a view send each other. If one of them is lost meanwhile, all calls raise ViewFailed.

    Members keep their connections as long as they stay the same.

    Args:
        store: where processes find each other.
        prefix: of its keys.
        agreement: knows who is lost.
        limits: how long others are waited for.
    """

    def __init__(self, store: Store, prefix: str, agreement: Agreement, limits: Limits) -> None:
        self._store, self._prefix, self._agreement, self._limits = store, prefix, agreement, limits
        self._members: tuple[int, ...] = ()
        self._between_members: GlooLink | None = None
        self._to_receivers: GlooLink | None = None

    def begin(self, view: View) -> None:
        """Begin to connect, with all that this process is to exchange with."""
        own = self._agreement.number
        if own in view.members and view.members != self._members:
            self.close()
            self._members, self._between_members = view.members, self._link(view, "members", view.members)
        ends = (view.source, *view.receivers)
        if own in ends:
            self._to_receivers = self._link(view, "receivers", ends)

    def _link(self, view: View, what: str, ends: Sequence[int]) -> GlooLink | None:
        if len(ends) == 1:
            return None
        return GlooLink(
            self._store, f"{self._prefix}/{view.number}/{what}", ends.index(self._agreement.number), len(ends),
            connect_timeout_s=self._limits.heartbeat_timeout_s, timeout_s=self._limits.timeout_s,
        )  # fmt: skip

    def sum(self, view: View, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the members, the same bits on all of them.

        Issues: one all-reduce per tensor.
        """
        if (link := self._between_members) is None:
            return
        try:
            self._agreement.until(view, link.is_connected)
            in_flight: collections.deque[dist.Work] = collections.deque()
            for tensor in tensors:
                if len(in_flight) == _IN_FLIGHT:
                    self._finish(view, in_flight.popleft())
                in_flight.append(link.all_reduce(tensor))
            while in_flight:
                self._finish(view, in_flight.popleft())
        except RuntimeError as error:
            self._raise(view, error)

    def give(self, view: View, state: Any) -> None:
        """Send ``state``, of tensors and plain values, to the receivers."""
        written = io.BytesIO()
        torch.save(state, written)
        data = written.getbuffer()
        self._broadcast(view, torch.tensor([len(data)]))
        self._broadcast(view, torch.frombuffer(data, dtype=torch.uint8))

    def take(self, view: View) -> Any:
        """What :meth:`give` sends."""
        size = torch.tensor([0])
        self._broadcast(view, size)
        data = bytearray(int(size))
        self._broadcast(view, torch.frombuffer(data, dtype=torch.uint8))
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    def _broadcast(self, view: View, tensor: Tensor) -> None:
        link = self._to_receivers
        assert link is not None, "begin() was called with this view"
        try:
            self._agreement.until(view, link.is_connected)
            for piece in tensor.split(_PIECE_BYTES):
                self._finish(view, link.broadcast(piece))
        except RuntimeError as error:
            self._raise(view, error)

    def _finish(self, view: View, work: dist.Work) -> None:
        self._agreement.until(view, work.is_completed)
        work.wait()

    def _raise(self, view: View, error: RuntimeError) -> NoReturn:
        """Raises: ViewFailed: a connection has failed; otherwise ``error`` itself."""
        if has_lost_connection(error):
            self._agreement.reject(view, f"process {self._agreement.number} lost a connection: {error}")
        raise error

    def end(self) -> None:
        """The view is committed: everything has arrived."""
        link, self._to_receivers = self._to_receivers, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Close all connections."""
        if self._between_members is not None:
            self._between_members.close()
        self._members, self._between_members = (), None
        self.end()
