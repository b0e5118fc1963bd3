"""Averages that are being made while training goes on.

A copy of the tensors is sent, so parameters may change meanwhile. When the average is applied, each rank keeps what it
has learnt since: new = average + (current - snapshot). Parameters are only written between two steps, by the training
thread, never while a forward or a backward reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks import StageContext, all_reduce
from overlap.hooks.engine.background import Completion, Item
from overlap.optim.local_sgd.average import Packed, Weight, pack

__all__ = ["PendingAverage"]

# Given names of tensors and their means, the new values, in the same storage or another.
Step = Callable[[Sequence[str], list[Tensor]], list[Tensor]]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Piece(Item):
    """Tensors that are sent together."""

    names: list[str]
    part: Packed
    snapshot: Tensor
    mean: Tensor
    completion: Completion = field(repr=False)

    def by_name(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of ``flat``, which is ``snapshot`` or ``mean``, with the tensors' names and shapes."""
        return zip(self.names, self.part.views(flat), strict=True)


class PendingAverage:
    """The average of one fragment of the model, begun and not yet applied. Needs two copies of the fragment.

    Args:
        tensors: what is averaged, by name.
        fragment: the fragment of the model that they are.
        apply_after: the step after which the average is applied.
        dtype: average in this dtype where it is wider.
        device: the tensors' device.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, fragment: int, apply_after: int, dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.fragment = fragment
        self.apply_after = apply_after
        names = {id(tensor): name for name, tensor in tensors.items()}
        self._pieces = [
            _Piece(
                index=place,
                names=[names[id(member)] for member in members],
                part=part,
                snapshot=part.empty(),
                mean=part.empty(),
                completion=Completion(device),
            )
            for place, (members, part) in enumerate(pack(tensors.values(), dtype=dtype))
        ]

    @torch.no_grad()
    def start(self, context: StageContext, group: dist.ProcessGroup, weight: Weight) -> None:
        """Copy the tensors, and average the copies over ``group`` behind all that was begun before.

        Issues, in the background: one all-reduce for each 8 MB.
        """
        for piece in self._pieces:
            piece.part.load(into=piece.snapshot)
            piece.mean.copy_(piece.snapshot)
            weight.scale_(piece.mean)

        async def work(piece: _Piece) -> None:
            await all_reduce(piece.mean, group=group)
            piece.completion.set()

        def fail(error: BaseException) -> None:
            for piece in self._pieces:
                piece.completion.fail(error)

        assert context.background is not None, "the runtime gives it to every stage that it attaches"
        context.background(self._pieces, work, on_failure=fail)

    def wait(self) -> None:
        """Wait until the average is there."""
        for piece in self._pieces:
            piece.completion.wait()

    @torch.no_grad()
    def apply(self, step: Step | None = None, *, stepped: Sequence[str] = ()) -> None:
        """Wait for the average and write the tensors; of the means of ``stepped``, ``step`` makes the new values."""
        self.wait()
        if step is not None:
            mean_of = dict(pair for piece in self._pieces for pair in piece.by_name(piece.mean))
            means = [mean_of[name] for name in stepped]
            copy_all(means, step(stepped, [mean.clone() for mean in means]))
        for piece in self._pieces:
            # Exactly the average where nothing was learnt meanwhile.
            piece.part.store(piece.part.load().sub_(piece.snapshot).add_(piece.mean))

    def state_dict(self) -> dict[str, Any]:
        """The average and what it was made of, by name; waits for it."""
        self.wait()
        return {
            "lands_after": self.apply_after,
            "unit": self.fragment,
            "snapshots": {
                name: view.clone() for piece in self._pieces for name, view in piece.by_name(piece.snapshot)
            },
            "means": {name: view.clone() for piece in self._pieces for name, view in piece.by_name(piece.mean)},
        }  # fmt: skip

    @classmethod
    @torch.no_grad()
    def restored(
        cls, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None, device: torch.device
    ) -> PendingAverage:
        """The average that :meth:`state_dict` saved, ready to be applied to ``tensors``.

        Raises:
            ConfigurationError: it is of other tensors.
        """
        pending = cls(tensors, fragment=state["unit"], apply_after=state["lands_after"], dtype=dtype, device=device)
        snapshots, means = state["snapshots"], state["means"]
        if set(snapshots) != {name for piece in pending._pieces for name in piece.names}:
            raise ConfigurationError("the pending average that was saved is of a model with other parameters")
        for piece in pending._pieces:
            copy_all(piece.part.views(piece.snapshot), [snapshots[name] for name in piece.names])
            copy_all(piece.part.views(piece.mean), [means[name] for name in piece.names])
            piece.completion.set()
        return pending
