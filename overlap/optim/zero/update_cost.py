"""What the update of one parameter costs, where that is more than its size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["orthogonalization_flops", "orthogonalization_steps"]


def orthogonalization_steps(options: Mapping[str, Any]) -> int:
    """How many Newton-Schulz steps an optimizer with these options of a group takes for each matrix; 0 for none.

    ``torch.optim.Muon`` and most others of the kind call the option ``ns_steps``.
    """
    steps = options.get("ns_steps", 0)
    return steps if isinstance(steps, int) else 0


def orthogonalization_flops(parameter: Tensor, steps: int) -> int:
    """The arithmetic of ``steps`` Newton-Schulz steps on ``parameter``, as a matrix of its first dimension by the rest.

    Of ``X``, which has ``m`` rows and ``n >= m`` columns, one step multiplies ``A = X X^T``, ``A A`` and ``A X``:
    ``4 m^2 n + 2 m^3`` floating-point operations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    >>> import torch
    >>> orthogonalization_flops(torch.empty(100, 10), steps=5)
    210000
    """
    if steps == 0 or parameter.dim() < 2 or parameter.numel() == 0:
        return 0
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    m, n = min(rows, columns), max(rows, columns)
    return steps * (4 * m * m * n + 2 * m**3)
