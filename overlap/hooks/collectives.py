"""Collectives that a stage awaits.

Each call describes one operation; awaiting it hands it to the scheduler, which launches it in its turn and resumes
the stage when the result is there (on an accelerator: when the stage's stream has been made to wait for it). Tensors
are contiguous and lie on the bucket's device. ``group`` is the process group to use, the model's own where ``None``;
ranks are counted within it. Nothing here may be awaited outside of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import Channel
from overlap.errors import ConfigurationError

__all__ = [
    "Channels",
    "Collective",
    "FutureResult",
    "Operation",
    "WholePass",
    "all_gather",
    "all_reduce",
    "broadcast",
    "future_result",
    "reduce_scatter",
    "send_recv",
    "whole_pass",
]


class Channels(Protocol):
    """Finds what carries the collectives of a group."""

    def of(self, group: dist.ProcessGroup | None) -> Channel: ...

    def next_tag(self) -> int: ...

    def open(self) -> None: ...


class Operation:
    """Something that a stage awaits."""

    label: str = ""
    sent_bytes: int = 0
    """Bytes that this rank sends for it, by the volume of the usual bandwidth-optimal algorithms."""
    is_under_way: bool = False
    """Whether it was started before the stage awaited it, so that launching it does nothing."""

    def launch(self, channels: Channels) -> None:
        """Start it; returns at once."""

    def finish(self, wait: Callable[[dist.Work], None]) -> Any:
        """Block until it is done (``wait`` decides what blocks: the thread or its stream), and give the result."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called on some thread when part of it is done, where that can be told; after the launch."""

    def __await__(self) -> Generator[Operation, Any, Any]:
        return (yield self)


class Collective(Operation):
    """An operation on a process group. ``start`` launches it on a channel and returns its works."""

    def __init__(
        self,
        label: str,
        group: dist.ProcessGroup | None,
        start: Callable[[Channel, int], Sequence[dist.Work]],
        *,
        sent: Callable[[int], float],
        then: Callable[[], None] | None = None,
    ) -> None:
        self.label = label
        self._group = group
        self._start = start
        self._sent = sent
        self._then = then
        self._works: Sequence[dist.Work] = ()

    def launch(self, channels: Channels) -> None:
        channel = channels.of(self._group)
        self.sent_bytes = int(self._sent(channel.size()))
        self._works = self._start(channel, channels.next_tag())

    def finish(self, wait: Callable[[dist.Work], None]) -> None:
        for work in self._works:
            wait(work)
        if self._then is not None:
            self._then()

    def when_done(self, callback: Callable[[], None]) -> None:
        for work in self._works:
            try:
                future = work.get_future()
            except (AttributeError, RuntimeError):
                return  # Works of messages between two ranks have none.
            future.then(lambda _: callback())


class FutureResult(Operation):
    """A future that is already under way."""

    label = "future"
    is_under_way = True

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def finish(self, wait: Callable[[dist.Work], None]) -> Any:
        return self._future.wait()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.then(lambda _: callback())


class WholePass(Operation):
    """Done when every bucket of the backward pass has come to the same place or is through."""

    label = "whole pass"


def all_reduce(tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> Operation:
    """Reduce ``tensor`` over the group, in place on every rank; sends ``2 N (W-1)/W`` elements."""

    def start(channel: Channel, tag: int) -> Sequence[dist.Work]:
        return channel.all_reduce(_as_real(tensor), op)

    return Collective("all_reduce", group, start, sent=lambda size: 2 * tensor.nbytes * (size - 1) / size)


def all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup | None = None) -> Operation:
    """Gather ``input``, shape ``(n,)``, of every rank into ``output``, shape ``(W * n,)``, in ranks' order.

    ``input`` may be this rank's part of ``output``. Sends ``n (W-1)`` elements.
    """

    def start(channel: Channel, tag: int) -> Sequence[dist.Work]:
        _check_numel("all_gather", output, input.numel() * channel.size())
        return channel.all_gather(_as_real(output), _as_real(input))

    return Collective("all_gather", group, start, sent=lambda size: input.nbytes * (size - 1))


def broadcast(tensor: Tensor, *, src: int, group: dist.ProcessGroup | None = None) -> Operation:
    """Copy ``tensor`` of rank ``src`` (counted in the group) to every rank, in place."""

    def start(channel: Channel, tag: int) -> Sequence[dist.Work]:
        return channel.broadcast(_as_real(tensor), src)

    return Collective("broadcast", group, start, sent=lambda size: tensor.nbytes * (size - 1) / size)


def send_recv(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    *,
    group: dist.ProcessGroup | None = None,
) -> Operation:
    """Send each ``(tensor, rank)`` of ``sends`` and fill each of ``receives``, all at once.

    Ranks are counted in the group. Messages between two ranks are matched in order.
    """

    def start(channel: Channel, tag: int) -> Sequence[dist.Work]:
        return channel.send_recv(
            [(_as_real(tensor), rank) for tensor, rank in sends],
            [(_as_real(tensor), rank) for tensor, rank in receives],
            tag,
        )

    sent_bytes = sum(tensor.nbytes for tensor, _ in sends)
    return Collective("send_recv", group, start, sent=lambda size: sent_bytes)


def reduce_scatter(output: Tensor, input: Tensor, *, group: dist.ProcessGroup | None = None) -> Operation:
    """Sum ``input``, shape ``(W * n,)``, over the group; rank ``r`` gets chunk ``r`` in ``output``, shape ``(n,)``.

    ``output`` may be this rank's chunk of ``input``; otherwise ``input`` is left as it is. Sends ``n (W-1)`` elements.
    Gloo's own reduce-scatter moves as much as an all-reduce, so on Gloo each rank sends every other one its chunk and
    adds up what it receives, in ranks' order; that takes ``n (W-1)`` elements of workspace.
    """
    parts: list[Tensor] = []

    def start(channel: Channel, tag: int) -> Sequence[dist.Work]:
        size, rank = channel.size(), channel.rank()
        _check_numel("reduce_scatter", input, output.numel() * size)
        if not channel.moves_halves:
            return channel.reduce_scatter(_as_real(output), _as_real(input))
        chunks = input.view(size, -1)
        parts.extend(chunks[rank] if peer == rank else torch.empty_like(chunks[rank]) for peer in range(size))
        # Starting with the next rank spreads the senders over the receivers.
        peers = [(rank + distance) % size for distance in range(1, size)]
        sends = [(_as_real(chunks[peer]), peer) for peer in peers]
        return channel.send_recv(sends, [(_as_real(parts[peer]), peer) for peer in peers], tag)

    def add_up() -> None:
        if not parts:
            return
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=output.view_as(parts[0]))
            return
        total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        for part in parts[2:]:
            total.add_(part)
        output.copy_(total.view_as(output))

    return Collective("reduce_scatter", group, start, sent=lambda size: output.nbytes * (size - 1), then=add_up)


def future_result(future: torch.futures.Future[Any]) -> Operation:
    """The value of a future that something else completes."""
    return FutureResult(future)


def whole_pass() -> Operation:
    """Go on when every bucket of this backward pass has come as far (or is through); moves no data."""
    return WholePass()


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_numel(what: str, tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise ConfigurationError(
            f"{what}: the tensor of all ranks has {tensor.numel()} elements, but one part a rank makes {numel}"
        )
