"""PowerSGD of one matrix on several ranks, written anew in plain tensors: all ranks in one loop."""

import torch
from torch import Tensor

from harness.wires import summed
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
        mean, errors = summed(self.wire, [factor.T.reshape(-1) / self.ranks for factor in factors])
        parts = [factor - error.view(shape).T * self.ranks for factor, error in zip(factors, errors, strict=True)]
        return parts, mean.view(shape).T
