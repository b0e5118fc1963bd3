"""Numbers of the unit interval in eight bits: the code of optimizer state in blocks.

[Note: dynamic maps]

From Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (https://arxiv.org/abs/2110.02861), section
2.2. In *dynamic tree quantization* a code is a sign, zeros that count the decimal exponent, a one, and a linear
fraction: of seven bits with ``k`` zeros in front, ``6 - k`` bits are fraction, so that numbers near 1 are precise and
small ones have a wide range. The paper's *dynamic quantization*, for the second moment, which is never negative, has
no sign and always one bit more of fraction.

The paper says nothing of where in its interval a fraction lies. Here fraction ``j`` of ``n`` stands for ``0.1 + 0.9 (j
+ 1) / n``, the end of its part of ``(0.1, 1]``: so both 1 and -1 have a code, the largest number of a block is exact,
and no two codes mean the same. What is all zeros stands for 0 with a sign and, without one, is the next smaller
exponent: a second moment that was rounded to 0 beside a first one that was not would make a step of no bound, as Li et
al. 2023 (https://arxiv.org/abs/2309.01507) have found for 4 bits, so without a sign there is no 0. The second moments
of a block range over seven orders of magnitude, and smaller ones count as the smallest.

A number is encoded by its 16-bit float, 11 significant bits for codes of at most 8, as a place in a table: the nearest
code but for ties and what that rounding moves across the middle between two. It is multiplied by ``2**15`` first, the
exponents of such floats being mostly below.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from overlap._torch.device import to_device

__all__ = ["DynamicMap"]

_FRACTIONS_FROM = 0.1
_UNIT = 2.0**15
_CODES = 256
_HALF_FLOATS = 65536


class DynamicMap:
    """Codes of one byte for numbers in ``[-1, 1]``, or with ``is_signed=False`` in ``[0, 1]``, times a scale for each
    row. See [Note: dynamic maps].

    Rounds in one way, to the nearest; a row is treated by itself. A row whose largest value is not finite decodes to
    nothing finite.
    """

    def __init__(self, *, is_signed: bool) -> None:
        self.is_signed = is_signed

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Encode ``values``, fp32 of shape ``(rows, n)``, into ``codes``, uint8 of the same shape, and ``scales``, fp32
        of shape ``(rows,)``, the largest magnitude of each row."""
        scaled = torch.empty_like(values)
        magnitudes = torch.abs(values, out=scaled) if self.is_signed else values
        torch.amax(magnitudes, dim=1, out=scales)
        # Of a row of zeros, these are no numbers, whose code is 0.
        torch.mul(values, scales.reciprocal().mul_(_UNIT)[:, None], out=scaled)
        halves = scaled.to(torch.float16).view(torch.int16)
        places = halves.to(torch.int32).bitwise_and_(_HALF_FLOATS - 1)
        table = _on_device(self.is_signed, values.device)[1]
        torch.index_select(table, 0, places.view(-1), out=codes.view(-1))

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """What ``codes`` and ``scales`` stand for, fp32, in the shape of ``codes``."""
        table = _on_device(self.is_signed, codes.device)[0]
        numbers = torch.index_select(table, 0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
        return numbers.mul_(scales[:, None])

    @property
    def numbers(self) -> Tensor:
        """What each code stands for, before it is scaled: fp64 of shape ``(256,)``."""
        return _numbers(self.is_signed)


def _tree(bits: int, extra_bits: int) -> list[float]:
    """What the codes of ``bits + extra_bits`` bits from 1 on stand for, or from 0 on if there are extra bits."""
    numbers = []
    for zeros in range(bits if extra_bits else bits - 1, -1, -1):
        count = 2 ** (max(0, bits - 1 - zeros) + extra_bits)
        largest = 10.0**-zeros
        numbers += [largest * (_FRACTIONS_FROM + (1 - _FRACTIONS_FROM) * (j + 1) / count) for j in range(count)]
    return numbers


@cache
def _numbers(is_signed: bool) -> Tensor:
    if not is_signed:
        return torch.tensor(_tree(7, extra_bits=1), dtype=torch.float64, device="cpu")
    positive = [0.0, *_tree(7, extra_bits=0)]
    return torch.tensor([*positive, *(-number for number in positive)], dtype=torch.float64, device="cpu")


@cache
def _tables(is_signed: bool) -> tuple[Tensor, Tensor]:
    """Of each code the number, fp32, and of each 16-bit float the code."""
    numbers, order = _numbers(is_signed).unique(sorted=True), _numbers(is_signed)
    code_of = torch.tensor([int((order == number).nonzero()[0]) for number in numbers], dtype=torch.uint8, device="cpu")
    halves = torch.arange(_HALF_FLOATS, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.float16)
    values = (halves.double() / _UNIT).nan_to_num_(nan=0.0).clamp_(-1.0, 1.0)
    middles = (numbers[1:] + numbers[:-1]) / 2
    codes = code_of[torch.bucketize(values, middles)]
    return order.float(), codes.masked_fill_(halves.isnan(), 0)


@cache
def _on_device(is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    numbers, codes = _tables(is_signed)
    return to_device(numbers, device), to_device(codes, device)
