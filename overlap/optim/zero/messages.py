"""The exchange by messages between every two ranks.

[Note: messages]

A piece of some size is sent from where it lies and, in the gather, received where it belongs, so it is never copied:
on a CPU memory is what computing, packing and the network's own copies compete for, and workspace would cost more than
the sharing of state saves. Small pieces go together in one message, since each has a price of its own. Both sides
order what one sends the other alike: large pieces first, then the small ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import add_all, copy_all
from overlap.hooks import Bucket, send_recv
from overlap.optim.zero.plan import Plan, Workspace

__all__ = ["gather_by_messages", "reduce_by_messages"]

# A message costs tens of microseconds, in which memory copies some 256 KB.
_LARGE_NUMEL = 64 * 1024


class _Lot:
    """The pieces that go from one rank to another, as messages."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.large = [piece for piece in pieces if piece.numel() >= _LARGE_NUMEL]
        self.small = [piece for piece in pieces if piece.numel() < _LARGE_NUMEL]
        self.small_numel = sum(piece.numel() for piece in self.small)
        self.numel = sum(piece.numel() for piece in self.large) + self.small_numel

    @property
    def pieces(self) -> list[Tensor]:
        """In the order in which they travel."""
        return [*self.large, *self.small]

    def messages(self, packed: Tensor) -> list[Tensor]:
        """What to send or receive; ``packed`` holds the small pieces."""
        return [*self.large, packed] if self.small_numel else self.large

    def pack(self, packed: Tensor) -> None:
        """Copy the small pieces together."""
        copy_all(_cut_like(packed, self.small), self.small)

    def unpack(self, packed: Tensor) -> None:
        """Copy the small pieces to where they belong."""
        copy_all(self.small, _cut_like(packed, self.small))


def _cut_like(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    return flat.split_with_sizes([piece.numel() for piece in pieces])


async def reduce_by_messages(bucket: Bucket, plan: Plan, workspace: Workspace) -> None:
    """Add to what this rank owns of ``bucket.buffer`` what the others have of it, in ranks' order.

    Sends each rank its part, ``N (W-1)/W`` elements in all, and receives as many into workspace.
    """
    lots = [_Lot(pieces) for pieces in plan.by_rank(plan.cut_flat(bucket.buffer))]
    own = lots[plan.rank]
    others = [(rank, lot) for rank, lot in enumerate(lots) if rank != plan.rank]
    outgoing = workspace.take(sum(lot.small_numel for _, lot in others), bucket.buffer)
    incoming = workspace.take(own.numel * len(others), bucket.buffer)
    outboxes = outgoing.split_with_sizes([lot.small_numel for _, lot in others])
    inboxes = incoming.split_with_sizes([own.numel for _ in others])
    sends: list[tuple[Tensor, int]] = []
    receives: list[tuple[Tensor, int]] = []
    for (rank, lot), outbox, inbox in zip(others, outboxes, inboxes, strict=True):
        lot.pack(outbox)
        sends += [(message, rank) for message in lot.messages(outbox)]
        coming = inbox.split_with_sizes([*(piece.numel() for piece in own.large), own.small_numel])
        receives += [(message, rank) for message in coming if message.numel()]
    await send_recv(sends, receives, group=bucket.group)
    for inbox in inboxes:
        add_all(own.pieces, _cut_like(inbox, own.pieces))
    workspace.give(outgoing)
    workspace.give(incoming)


async def gather_by_messages(plan: Plan, group: dist.ProcessGroup, workspace: Workspace) -> None:
    """Send what this rank owns of the parameters to all others, and receive what they own."""
    lots = [_Lot(pieces) for pieces in plan.by_rank(plan.parameter_pieces)]
    own = lots[plan.rank]
    space = workspace.take(sum(lot.small_numel for lot in lots), plan.parameter_pieces[0])
    boxes = space.split_with_sizes([lot.small_numel for lot in lots])
    own.pack(boxes[plan.rank])
    others = [(rank, lot, box) for rank, (lot, box) in enumerate(zip(lots, boxes, strict=True)) if rank != plan.rank]
    # What the network writes is seen by no one else.
    torch.autograd.graph.increment_version([piece for _, lot, _ in others for piece in lot.large])
    await send_recv(
        [(message, rank) for rank, _, _ in others for message in own.messages(boxes[plan.rank])],
        [(message, rank) for rank, lot, box in others for message in lot.messages(box)],
        group=group,
    )
    for _, lot, box in others:
        lot.unpack(box)
    workspace.give(space)
