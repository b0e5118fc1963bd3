"""Collectives that a stage awaits.

Each function describes one operation. Awaiting it passes it to the scheduler, which launches it when its turn comes
and resumes the stage when the result is there (on an accelerator: when the stage's stream will wait for it). Tensors
must be contiguous and on the bucket's device. ``group`` is the process group to use, the model's own where ``None``;
ranks are ranks within it. Nothing here can be awaited outside of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import Channel, GroupChannel
from overlap.errors import ConfigurationError

if TYPE_CHECKING:
    from overlap.hooks.engine.channels import Channels


class Operation:
    """Something that a stage awaits."""

    label: str = ""
    awaits_whole_pass = False
    """Whether it is done only when every other bucket of the pass awaits the same or is done."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends for it with the usual bandwidth-optimal algorithms; known after the launch."""
        return 0

    def launch(self, channels: Channels) -> None:
        """Start it; returns at once."""

    def finish(self, wait: Callable[[dist.Work], None]) -> Any:
        """Wait until it is done and return the result; ``wait`` blocks the thread or makes its stream wait."""

    def abandon(self, wait: Callable[[dist.Work], None]) -> None:
        """As :meth:`finish`, for a stage that was closed: nothing follows."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called on any thread when part of it is done, where that can be observed."""

    def __await__(self) -> Generator[Operation, Any, Any]:
        return (yield self)


class Collective(Operation):
    """An operation on a process group, the model's own where ``group`` is ``None``.

    ``start`` launches it on a channel and returns its works; ``sent`` gives the bytes that a rank sends, for a number
    of ranks.
    """

    def __init__(
        self,
        label: str,
        group: dist.ProcessGroup | None,
        start: Callable[[Channel], Sequence[dist.Work]],
        *,
        sent: Callable[[int], float],
    ) -> None:
        self.label = label
        self._group = group
        self._start = start
        self._sent = sent
        self._channel: Channel | None = None
        self._works: Sequence[dist.Work] = ()

    @property
    def sent_bytes(self) -> int:
        return 0 if self._channel is None else int(self._sent(self._channel.size()))

    def __await__(self) -> Iterator[Operation]:  # type: ignore[override]
        return iter((self,))  # It has no result to be resumed with.

    def launch(self, channels: Channels) -> None:
        if (channel := self._channel) is None or not channel.lasts:
            self._channel = channel = channels.for_group(self._group)
        self._works = self._start(channel)

    def finish(self, wait: Callable[[dist.Work], None]) -> None:
        works, self._works = self._works, ()  # A plan keeps this, but not what it has sent.
        for work in works:
            wait(work)

    abandon = finish

    def when_done(self, callback: Callable[[], None]) -> None:
        for work in self._works:
            try:
                future = work.get_future()
            except (AttributeError, RuntimeError):
                return  # A message between two ranks has no future.
            future.then(lambda _: callback())


class FutureResult(Operation):
    """Waits for a future that something else completes."""

    label = "future"

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def finish(self, wait: Callable[[dist.Work], None]) -> Any:
        return self._future.wait()

    def abandon(self, wait: Callable[[dist.Work], None]) -> None:
        if self._future.done():  # Otherwise the host would wait.
            self._future.wait()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._future.then(lambda _: callback())


class WholePass(Operation):
    """See :func:`whole_pass`."""

    label = "whole pass"
    awaits_whole_pass = True


def all_reduce(tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> Operation:
    """Reduce ``tensor`` over the group, in place on every rank; sends ``2 N (W-1)/W`` elements.

    >>> @reducer
    ... async def mean(bucket):
    ...     await all_reduce(bucket.buffer, group=bucket.group)
    ...     bucket.buffer.div_(bucket.divisor)
    >>> chain(mean).register(ddp)
    <chain(mean) registered>
    >>> loss_fn(ddp(x), y).backward()
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    start = methodcaller("all_reduce", real, op)  # As a lambda it would be one more call of Python's for every bucket.
    return Collective("all_reduce", group, start, sent=lambda size: 2 * tensor.nbytes * (size - 1) / size)


def all_gather(output: Tensor, input: Tensor, *, group: dist.ProcessGroup | None = None) -> Operation:
    """Gather ``input``, shape ``(n,)``, of every rank into ``output``, shape ``(W * n,)``, in the order of ranks.

    ``input`` may be this rank's part of ``output``. Sends ``n (W-1)`` elements.

    >>> @reducer
    ... async def mean(bucket):
    ...     own = bucket.buffer
    ...     gathered = torch.empty(bucket.group.size() * own.numel())
    ...     await all_gather(gathered, own.clone(), group=bucket.group)
    ...     own.copy_(gathered.view(-1, own.numel()).sum(0) / bucket.divisor)
    >>> chain(mean).register(ddp)
    <chain(mean) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    def start(channel: Channel) -> Sequence[dist.Work]:
        return channel.all_gather(*_checked("all_gather", output, input, channel.size()))

    return Collective("all_gather", group, start, sent=lambda size: input.nbytes * (size - 1))


def send_recv(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    *,
    group: dist.ProcessGroup | None = None,
    label: str = "send_recv",
) -> Operation:
    """Send each ``(tensor, rank)`` of ``sends`` and receive into each ``(tensor, rank)`` of ``receives``, concurrently.

    Messages between two ranks are matched in order. ``label`` names them in profiles and timelines.

    >>> async def to_the_next(bucket):
    ...     rank, ranks = bucket.group.rank(), bucket.group.size()
    ...     received = torch.empty_like(bucket.buffer)
    ...     if ranks > 1:
    ...         sends, receives = [(bucket.buffer, (rank + 1) % ranks)], [(received, (rank - 1) % ranks)]
    ...         await send_recv(sends, receives, group=bucket.group)
    >>> chain(AllReduce(), to_the_next).register(ddp)
    <chain(AllReduce(), to_the_next) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    def start(channel: Channel) -> Sequence[dist.Work]:
        return channel.send_recv(_all_as_real(sends), _all_as_real(receives))

    return Collective(label, group, start, sent=lambda size: sum([tensor.nbytes for tensor, _ in sends]))


def all_to_all(outputs: Tensor, inputs: Tensor, *, group: dist.ProcessGroup) -> Operation:
    """Send ``inputs[r]``, of a tensor of shape ``(W, n)``, to each rank ``r``, and receive from it into ``outputs[r]``.

    On NCCL it is one collective. Elsewhere it is messages, and each rank starts with the next one, so that not all
    send to the same rank at once.
    """
    ranks, rank = group.size(), group.rank()

    def start(channel: Channel) -> Sequence[dist.Work]:
        if isinstance(channel, GroupChannel) and channel.has_all_to_all(inputs.device):
            return channel.all_to_all(outputs, inputs)
        outputs[rank].copy_(inputs[rank])
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        return channel.send_recv([(inputs[peer], peer) for peer in peers], [(outputs[peer], peer) for peer in peers])

    sent = inputs.nbytes - inputs[rank].nbytes
    return Collective("send_recv", group, start, sent=lambda size: sent)


def add_messages(
    sends: Sequence[tuple[Tensor, int]], rows: Sequence[Sequence[Tensor]], *, group: dist.ProcessGroup
) -> Operation:
    """Send each ``(tensor, rank)`` of ``sends``, and add the messages of every other rank, in the order of ranks.

    A reduce-scatter of parts that are anywhere in memory. Each of ``rows`` is one message from every other rank: the
    flat tensors that its parts are added to, one after another. Messages between two ranks are matched in order. All
    tensors have one dtype. On Gloo received messages take the memory of two rows, elsewhere of all.
    """

    def start(channel: Channel) -> Sequence[dist.Work]:
        is_complex = bool(rows) and rows[0][0].is_complex()
        real = [[torch.view_as_real(target).view(-1) for target in row] for row in rows] if is_complex else rows
        return channel.add_messages(_all_as_real(sends), real)

    sent = sum([tensor.nbytes for tensor, _ in sends])
    return Collective("reduce_scatter", group, start, sent=lambda size: sent)


def reduce_each(tensors: Sequence[tuple[Tensor, int]], *, group: dist.ProcessGroup) -> Operation:
    """Sum each ``(tensor, rank)`` over the group, in place on that rank, as one group of reductions where the backend
    has such; elsewhere its values are undefined on backends other than NCCL. Sends ``N (W-1)/W`` elements on average.
    """
    return _each("reduce_scatter", "reduce", tensors, group)


def broadcast_each(tensors: Sequence[tuple[Tensor, int]], *, group: dist.ProcessGroup) -> Operation:
    """Copy each ``(tensor, rank)`` from that rank to all others, in place, as one group of broadcasts where the backend
    has such. Sends ``N (W-1)/W`` elements on average."""
    return _each("all_gather", "broadcast", tensors, group)


def _each(label: str, name: str, tensors: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup) -> Operation:
    def start(channel: Channel) -> Sequence[dist.Work]:
        assert isinstance(channel, GroupChannel), "on a CPU whole tensors travel as messages"
        return channel.each(name, _all_as_real(tensors))

    nbytes = sum([tensor.nbytes for tensor, _ in tensors])
    return Collective(label, group, start, sent=lambda size: nbytes * (size - 1) / size)


def reduce_scatter(output: Tensor, input: Tensor, *, group: dist.ProcessGroup | None = None) -> Operation:
    """Sum ``input``, shape ``(W * n,)``, over the group; rank ``r`` gets chunk ``r`` in ``output``, shape ``(n,)``.

    ``output`` may be this rank's chunk of ``input``; otherwise ``input`` is not changed. Sends ``n (W-1)`` elements.
    Gloo's own reduce-scatter sends as much as an all-reduce. So on Gloo each rank sends each other rank that rank's
    chunk, and adds the received ones to its own in the order of ranks, with ``n (W-1)`` elements of workspace.

    >>> @reducer
    ... async def mean(bucket):
    ...     ranks, own = bucket.group.size(), bucket.buffer
    ...     parts = torch.nn.functional.pad(own, (0, -own.numel() % ranks))
    ...     part = torch.empty(parts.numel() // ranks)
    ...     await reduce_scatter(part, parts, group=bucket.group)
    ...     await all_gather(parts, part, group=bucket.group)
    ...     own.copy_(parts[: own.numel()] / bucket.divisor)
    >>> chain(mean).register(ddp)
    <chain(mean) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    def start(channel: Channel) -> Sequence[dist.Work]:
        whole, own = _checked("reduce_scatter", input, output, channel.size())
        return channel.reduce_scatter(own, whole)

    sent = output.nbytes
    return Collective("reduce_scatter", group, start, sent=lambda size: sent * (size - 1))


def future_result(future: torch.futures.Future[Any]) -> Operation:
    """Wait for ``future``, which something else completes, and return its value.

    >>> @reducer
    ... async def summed(bucket):
    ...     work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)
    ...     await future_result(work.get_future())
    >>> chain(summed).register(ddp)
    <chain(summed) registered>
    >>> loss_fn(ddp(x), y).backward()
    """
    return FutureResult(future)


def whole_pass() -> Operation:
    """Wait until every other bucket of this backward pass awaits the same or is done; sends nothing.

    >>> norms = {}
    >>> async def clipped(bucket):
    ...     norms[bucket.index] = bucket.buffer.norm()
    ...     await whole_pass()  # every bucket's norm is there
    ...     norm = torch.stack(list(norms.values())).norm()
    ...     bucket.buffer.mul_(torch.clamp(1 / norm, max=1))
    >>> chain(AllReduce(), clipped).register(ddp)
    <chain(AllReduce(), clipped) registered>
    >>> loss_fn(ddp(x), y).backward()
    """
    return WholePass()


def _all_as_real(messages: Sequence[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    return [(torch.view_as_real(tensor) if tensor.is_complex() else tensor, rank) for tensor, rank in messages]


def _checked(name: str, whole: Tensor, part: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """``whole``, which has a ``part`` for each of so many ranks, and ``part``, as real tensors."""
    if whole.numel() != part.numel() * ranks:
        raise ConfigurationError(
            f"{name}: the tensor for all ranks has {whole.numel()} elements; one part per rank makes "
            f"{part.numel() * ranks}"
        )
    return (torch.view_as_real(whole), torch.view_as_real(part)) if whole.is_complex() else (whole, part)
