"""Averages that are being made while training goes on.

A copy of the tensors is sent, so parameters may change meanwhile. When the average is applied, each rank keeps the
updates that it made since: new = average + (current - snapshot). Parameters are only written between two steps, by the
training thread, never while a forward or a backward reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import hold
from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks import StageContext, all_reduce
from overlap.hooks.engine.background import Completion, Item
from overlap.optim.local_sgd.average import Packed, Weight, pack_named
from overlap.optim.local_sgd.compressed import CompressedMean, Ranks

__all__ = ["PendingAverage", "Sent"]

# Given names of tensors and their means, the new values, in the same storage or another.
Step = Callable[[Sequence[str], list[Tensor]], list[Tensor]]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Piece(Item):
    """Tensors that are sent together."""

    names: list[str]
    is_compressed: bool
    part: Packed
    snapshot: Tensor
    mean: Tensor
    completion: Completion = field(repr=False)

    def by_name(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of ``flat``, which is ``snapshot`` or ``mean``, with the tensors' names and shapes."""
        return zip(self.names, self.part.views(flat), strict=True)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What is averaged, by name, and how it travels."""

    exactly: Mapping[str, Tensor]
    as_changes: Mapping[str, Tensor] = field(default_factory=dict)
    """Sent through a wire."""
    dtype: torch.dtype | None = None
    """Average in this dtype where it is wider."""


class PendingAverage:
    """The average of one fragment of the model, begun and not yet applied. Needs two copies of the fragment.

    Args:
        sent: what is averaged.
        fragment: the fragment of the model that it is.
        level: the level of ranks that average.
        apply_after: the step after which the average is applied.
        device: the tensors' device.
    """

    def __init__(self, sent: Sent, *, fragment: int, level: int, apply_after: int, device: torch.device) -> None:
        self.fragment = fragment
        self.level = level
        self.apply_after = apply_after
        self._compressed: CompressedMean | None = None
        packs = [
            (is_compressed, names, part)
            for is_compressed, tensors in ((True, sent.as_changes), (False, sent.exactly))
            for names, part in pack_named(tensors, dtype=sent.dtype)
        ]
        self._pieces = [
            _Piece(
                index=place,
                names=names,
                is_compressed=is_compressed,
                part=part,
                snapshot=part.empty(),
                mean=part.empty(),
                completion=Completion(device),
            )
            for place, (is_compressed, names, part) in enumerate(packs)
        ]

    @torch.no_grad()
    def start(
        self, context: StageContext, ranks: Ranks, weight: Weight, *, compressed: CompressedMean | None = None,
        anchors: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Copy the tensors, and average the copies over ``ranks`` behind all that was begun before.

        Issues, in the background, for each 8 MB: one all-reduce, or for changes what ``compressed`` issues.
        """
        for piece in self._pieces:
            piece.part.load(into=piece.snapshot)
            piece.mean.copy_(piece.snapshot)
            if not piece.is_compressed:
                weight.scale_(piece.mean)
        if compressed is not None:
            compressed.memory.begin()
            self._compressed = compressed

        async def work(piece: _Piece) -> None:
            hold(piece.mean)  # The average may be dropped before it is there.
            if piece.is_compressed:
                assert compressed is not None and anchors is not None, "changes are sent through a wire"
                await compressed.mean(piece.mean, piece.names, piece.part, anchors, ranks, weight)
            else:
                await all_reduce(piece.mean, group=ranks.whole)
            piece.completion.set()

        def fail(error: BaseException) -> None:
            for piece in self._pieces:
                piece.completion.fail(error)

        assert context.background is not None, "the runtime gives it to every stage that it attaches"
        context.background(self._pieces, work, on_failure=fail)

    def wait(self) -> None:
        """Wait until the average is there, or has failed; then the compressed mean's memory is settled."""
        compressed, self._compressed = self._compressed, None
        try:
            for piece in self._pieces:
                piece.completion.wait()
        except BaseException:
            if compressed is not None:
                compressed.memory.settle(failed=True)
            raise
        if compressed is not None:
            compressed.memory.settle(failed=False)

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
            "level": self.level,
            "snapshots": {
                name: view.clone() for piece in self._pieces for name, view in piece.by_name(piece.snapshot)
            },
            "means": {name: view.clone() for piece in self._pieces for name, view in piece.by_name(piece.mean)},
        }  # fmt: skip

    @classmethod
    @torch.no_grad()
    def restored(cls, state: Mapping[str, Any], sent: Sent, *, level: int, device: torch.device) -> PendingAverage:
        """The average that :meth:`state_dict` saved, ready to be applied to the tensors in ``sent``.

        Raises:
            ConfigurationError: it is of other tensors.
        """
        pending = cls(sent, fragment=state["unit"], level=level, apply_after=state["lands_after"], device=device)
        snapshots, means = state["snapshots"], state["means"]
        if set(snapshots) != {name for piece in pending._pieces for name in piece.names}:
            raise ConfigurationError("the pending average that was saved is of a model with other parameters")
        for piece in pending._pieces:
            copy_all(piece.part.views(piece.snapshot), [snapshots[name] for name in piece.names])
            copy_all(piece.part.views(piece.mean), [means[name] for name in piece.names])
            piece.completion.set()
        return pending
