"""The noise of stochastic rounding.

A number that has noise added to it, uniform between minus a half and a half, and is then rounded to nearest, is rounded
up or down with its own mean. Drawing the noise is most of what stochastic rounding costs on a CPU, so four numbers are
taken from each 64 bits that a generator gives. They are made odd, so that they lie evenly around zero and never reach a
half: a whole number stays what it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NOISE_BITS", "add_noise_", "draw"]

NOISE_BITS = 16
"""Noise is odd multiples of 2**-16."""

_ODD = 0x0001_0001_0001_0001


def draw(rows: int, numel: int, device: torch.device, generator: torch.Generator, *, bits: int = NOISE_BITS) -> Tensor:
    """Noise in units of ``2**-bits``, at most 16: odd int16 numbers below ``2**(bits - 1)``, shape ``(rows, numel)``.

    Each row begins with bits of its own, so rows have the numbers that they have when they are drawn one by one.
    """
    words = torch.empty(rows, -(-numel // 4), dtype=torch.int64, device=device)
    # The whole range: without a beginning the highest bit would always be 0.
    words.random_(-(2**63), None, generator=generator)
    numbers = words.view(torch.int16)
    if bits < NOISE_BITS:
        numbers.bitwise_right_shift_(NOISE_BITS - bits)
    words.bitwise_or_(_ODD)
    return numbers[:, :numel]


def add_noise_(values: Tensor, generator: torch.Generator, *, bits: int = NOISE_BITS) -> Tensor:
    """Add to ``values``, shape ``(rows, ...)``, noise between minus a half and a half, odd multiples of ``2**-bits``.

    Rounded to nearest then, a value is off on average by at most ``2**-bits``, and a whole number not at all, if the
    values have at most ``24 - bits`` bits before the point.
    """
    rows = len(values)
    noise = draw(rows, values.numel() // max(rows, 1), values.device, generator, bits=bits)
    return values.add_(noise.view(values.shape), alpha=2.0**-bits)
