"""PowerSGD of one matrix on several ranks, written anew in plain tensors: all ranks in one loop."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overlap.hooks.powersgd.algorithm import random_directions
from overlap.hooks.wires import Wire


class ByHand:
    """The mean of one `(n, m)` matrix over ranks, step by step."""

    def __init__(
        self,
        ranks: int,
        shape: tuple[int, int],
        rank: int,
        *,
        wire: Wire | None = None,
        alternate: bool = False,
    ) -> None:
        self.ranks, self.shape, self.rank = ranks, shape, rank
        self.wire, self.alternate = wire, alternate
        self.residuals = [torch.zeros(shape) for _ in range(ranks)]
        # Directions in columns, as in the paper.
        self.factor: Tensor | None = None
        self.is_left = False
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> Tensor:
        matrices = [g + e for g, e in zip(gradients, self.residuals, strict=True)]
        finds_left = self.alternate and self.steps % 2 == 0
        start = self._start(is_left=self.alternate and not finds_left)
        if finds_left:
            basis = torch.linalg.qr(start)[0]
            parts, p = self._mean([m @ basis for m in matrices])
            delivered, output, kept = [part @ basis.T for part in parts], p @ basis.T, p
        else:
            if self.alternate:
                basis = torch.linalg.qr(start)[0]
            else:
                basis = torch.linalg.qr(self._mean([m @ start for m in matrices])[1])[0]
            parts, q = self._mean([m.T @ basis for m in matrices])
            delivered, output, kept = [basis @ part.T for part in parts], basis @ q.T, q
        self.residuals = [m - d for m, d in zip(matrices, delivered, strict=True)]
        self.factor, self.is_left = kept / kept.norm(dim=0, keepdim=True), finds_left
        self.steps += 1
        return output

    def _start(self, *, is_left: bool) -> Tensor:
        length = self.shape[0] if is_left else self.shape[1]
        if self.factor is not None and self.is_left == is_left:
            return self.factor
        fresh = random_directions(self.rank, length, seed=0, step=None, dtype=torch.float32, device=torch.device("cpu"))
        return fresh.T * length**-0.5

    def _mean(self, factors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """What of each rank's is delivered, and the mean."""
        if self.wire is None:
            return factors, sum(factors, torch.zeros_like(factors[0])) / self.ranks
        shape = factors[0].T.shape
        numel = shape.numel()
        codec = self.wire.codec(math.ceil(numel / self.ranks))
        whole = torch.zeros(self.ranks, self.ranks * codec.numel)
        for rank, factor in enumerate(factors):
            whole[rank, :numel] = factor.T.reshape(-1) / self.ranks
        # values[rank][owner]: what a rank has of the part that `owner` sums.
        values = torch.stack([row[: self.ranks * codec.numel].view(self.ranks, -1) for row in whole])
        # The codec's padding is behind each part, not behind the whole.
        part_numel = codec.numel
        missing, mean = torch.zeros_like(values), torch.zeros(self.ranks, part_numel)

        def decoded(one: Tensor) -> Tensor:
            message, out = torch.empty(codec.message_bytes, dtype=torch.uint8), torch.empty_like(one)
            codec.encode(one, message)
            codec.decode(message, out)
            return out

        for owner in range(self.ranks):
            total = values[owner][owner].clone()
            for rank in [(owner + distance) % self.ranks for distance in range(1, self.ranks)]:
                sent = decoded(values[rank][owner])
                missing[rank][owner] = values[rank][owner] - sent
                total += sent
            mean[owner] = decoded(total)
            missing[owner][owner] = total - mean[owner]

        def shaped(flat: Tensor) -> Tensor:
            return flat.reshape(-1)[:numel].view(shape).T

        parts = [shaped(values[rank] - missing[rank]) * self.ranks for rank in range(self.ranks)]
        return parts, shaped(mean)
