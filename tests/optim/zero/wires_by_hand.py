"""What ZeRO with wires computes, worked out on one process for all ranks: no DDP, no stage, no collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import Case, mean_squared_error
from overlap import Wire, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.hooks import Bucket
from overlap.optim.zero.shards import flatten

ADAMW = {"lr": 0.01, "weight_decay": 0.1}
Cut = Sequence[Sequence[str]]
"""The names of the parameters in each bucket of a pass, in order."""


class ByHand:
    """Every rank's gradients, the messages between them, one AdamW on the true weights, and the public parameters."""

    def __init__(
        self,
        case: Case,
        world_size: int,
        ranges: Mapping[str, Sequence[tuple[int, int]]],
        *,
        reduce_wire: Wire | None = None,
        gather_wire: Wire | None = None,
        error_feedback: bool = False,
        is_even: bool = True,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        self.case, self.world_size, self.ranges = case, world_size, ranges
        self.reduce_wire, self.gather_wire, self.error_feedback = reduce_wire, gather_wire, error_feedback
        self.is_even = is_even
        self.model = case.model()
        self.public = dict(self.model.named_parameters())
        self.true = {
            name: nn.Parameter(p.detach().to(master_dtype if wider(p, master_dtype) else p.dtype, copy=True))
            for name, p in self.public.items()
            if name in ranges
        }
        self.optimizer = torch.optim.AdamW(self.true.values(), **ADAMW)
        self.errors: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
        # Seeded with the rank, as the stage's are.
        self.generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]

    def step(self, step: int, cut: Cut, *, joined: Sequence[int] = ()) -> None:
        """One step on the batches of all ranks that have not ``joined``."""
        gradients = [self.gradients(step, rank, is_zero=rank in joined) for rank in range(self.world_size)]
        for names in cut:
            self._reduce([name for name in names if name in self.ranges], gradients)
        self.optimizer.step()
        for names in cut:
            self._gather([name for name in names if name in self.ranges])

    def gradients(self, step: int, rank: int, *, is_zero: bool) -> dict[str, Tensor]:
        if is_zero:
            return {name: torch.zeros_like(p) for name, p in self.public.items()}
        self.model.zero_grad()
        mean_squared_error(self.model, self.case.batch(step, rank)).backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.public.items()}

    def edit(self, change: Callable[[nn.Module], None]) -> None:
        """Let ``change`` edit the parameters; what it changes is changed in the true weights, too."""
        before = {name: p.detach().clone() for name, p in self.public.items()}
        with torch.no_grad():
            change(self.model)
            for name, true in self.true.items():
                public = self.public[name]
                true.copy_(torch.where(public == before[name], true, public))

    def _pieces(self, names: Sequence[str], tensors: Mapping[str, Tensor], owner: int) -> list[Tensor]:
        parts = [flatten(tensors[name])[slice(*self.ranges[name][owner])] for name in names]
        return [part for part in parts if part.numel()]

    @torch.no_grad()
    def _reduce(self, names: Sequence[str], gradients: list[dict[str, Tensor]]) -> None:
        means = {name: torch.empty_like(gradients[0][name]) for name in names}
        summands = []
        for rank, given in enumerate(gradients):
            wide = {name: given[name] if self.reduce_wire is None else given[name].float() for name in names}
            mine = {name: gradient * (1 / self.world_size) for name, gradient in wide.items()}
            for name in names:
                if name in self.errors[rank]:
                    mine[name] += self.errors[rank][name]
            summands.append(mine)
        sent = [self._messages(rank, names, mine) for rank, mine in enumerate(summands)]
        for owner in range(self.world_size):
            if not self._pieces(names, means, owner):
                continue
            # A reduction in full adds the others' parts to the owner's; one through a wire adds in the order of ranks.
            order = list(range(self.world_size))
            if self.reduce_wire is None:
                order.sort(key=lambda rank: rank != owner)
            mean = sent[order[0]][owner].clone()
            for rank in order[1:]:
                mean += sent[rank][owner]
            pieces = self._pieces(names, means, owner)
            for piece, part in zip(pieces, mean.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(part)
            own = self._pieces(names, summands[owner], owner)
            for error, piece, part in zip(own, pieces, mean.split([p.numel() for p in own]), strict=True):
                error.copy_(part - piece)
        for rank, left in enumerate(summands):
            if self.error_feedback:
                self.errors[rank].update(left)
        for name in names:
            self.true[name].grad = means[name].to(self.true[name].dtype)

    def _messages(self, rank: int, names: Sequence[str], mine: dict[str, Tensor]) -> dict[int, Tensor]:
        """What each owner makes of this rank's part, and in ``mine`` what was left out of it."""
        made: dict[int, Tensor] = {}
        for distance in range(self.world_size):
            owner = (rank + distance) % self.world_size
            pieces = self._pieces(names, mine, owner)
            if not pieces:
                continue
            values = torch.cat(pieces)
            made[owner] = values.clone()
            if owner != rank:
                made[owner] = through(self.reduce_wire, values, self.generators[rank], numel=self._numel(names, owner))
                left = (values - made[owner]).split([piece.numel() for piece in pieces])
                for piece, part in zip(pieces, left, strict=True):
                    piece.copy_(part)
        return made

    def _numel(self, names: Sequence[str], owner: int) -> int:
        """The length of a message of the part of ``owner``: where parameters are cut, that of the longest part."""
        owners = range(self.world_size) if self.is_even else [owner]
        return max(sum(p.numel() for p in self._pieces(names, self.public, one)) for one in owners)

    @torch.no_grad()
    def _gather(self, names: Sequence[str]) -> None:
        for owner in range(self.world_size):
            pieces = self._pieces(names, self.public, owner)
            if not pieces:
                continue
            true = self._pieces(names, self.true, owner)
            if self.gather_wire is None:
                for piece, part in zip(pieces, true, strict=True):
                    piece.copy_(part)
                continue
            difference = torch.cat([(t.to(_wide(t)) - p).float() for t, p in zip(true, pieces, strict=True)])
            decoded = through(self.gather_wire, difference, None, numel=self._numel(names, owner))
            for piece, part in zip(pieces, decoded.split([p.numel() for p in pieces]), strict=True):
                piece.add_(part)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def wider(parameter: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.itemsize > parameter.dtype.itemsize


def through(wire: Wire | None, values: Tensor, generator: Any, *, numel: int) -> Tensor:
    """What comes out of the wire."""
    if wire is None:
        return values
    codec = wire.codec(numel)
    padded = torch.zeros(codec.numel)
    padded[: values.numel()] = values
    message = torch.empty(codec.message_bytes, dtype=torch.uint8)
    codec.encode(padded, message, generator if wire.is_stochastic else None)
    out = torch.empty(codec.numel)
    codec.decode(message, out)
    return out[: values.numel()]


class Cuts:
    """A transform that notes the buckets of each pass."""

    def __init__(self) -> None:
        self.passes: list[list[Sequence[str]]] = []

    def __call__(self, bucket: Bucket) -> None:
        if bucket.index == 0:
            self.passes.append([])
        self.passes[-1].append(bucket.names)


def made(ddp: Any, *, form: Mapping[str, Any], parameters: Any = None, **options: Any) -> tuple[Any, Any, Cuts]:
    """The optimizer, the stage and the cuts of a model."""
    given = ddp.parameters() if parameters is None else parameters
    zero = ZeroRedundancyOptimizer(given, torch.optim.AdamW, overlap_with_ddp=True, **ADAMW, **options)
    stage, cuts = ZeroStep(zero, **form), Cuts()
    chain(cuts, stage).register(ddp)
    return zero, stage, cuts


def ranges_of(ddp: Any, zero: ZeroRedundancyOptimizer) -> dict[str, tuple[tuple[int, int], ...]]:
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    return {names[key]: shard.ranges for key, shard in zero.shards.items()}


def by_hand(case: Case, world_size: int, ddp: Any, zero: Any, stage: Any, **options: Any) -> ByHand:
    """The reference of a stage, with its wires and its division."""
    return ByHand(
        case,
        world_size,
        ranges_of(ddp, zero),
        reduce_wire=stage.reduce_wire,
        gather_wire=stage.gather_wire,
        error_feedback=stage.error_feedback,
        is_even=zero.partition == "element",
        **options,
    )


def parameters_of(ddp: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def true_of(ddp: Any, zero: Any) -> Iterator[tuple[str, int, Tensor]]:
    """The parts of true weights that this rank has: name of the parameter, where the part begins, the part."""
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    for key, shard in zero.shards.items():
        if shard.own is not None:
            yield names[key], shard.range[0], flatten(shard.own)
