"""Triton kernels that encode and decode chunks; see [Note: kernels of our own] in :mod:`overlap.hooks.wires.kernels`.

They do what :class:`ChunkCodec` and its grids do by PyTorch's operators, in the same arithmetic: divisions are rounded
as IEEE 754 has it, products and sums are not fused, and random numbers are drawn by PyTorch. A program takes a few
chunks, each as two halves, whose numbers share bytes in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap.hooks.wires.noise import NOISE_BITS, draw
from overlap.hooks.wires.row_kernels import RowCodec

__all__ = ["TritonKernels"]

# Values of a program, and of the largest chunk that one takes.
_PROGRAM_NUMEL = 4096
_LARGEST_CHUNK = 16 * 1024

_LARGEST_FP32 = tl.constexpr(3.4028234663852886e38)
# Added and subtracted again, it leaves a whole number, to nearest and ties to even, of what is far below it.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_BITS_OF_INFINITY = tl.constexpr(0x7F800000)
_BITS_OF_MINUS_ZERO = tl.constexpr(-0x80000000)
_NOISE_UNIT = tl.constexpr(2.0**-NOISE_BITS)
# Of float8_e4m3fn: as an fp32 exponent, the smallest normal number; half a last place; the distance of the biases.
_SMALLEST_E4M3 = tl.constexpr(2.0**-6)
_EPS_E4M3 = tl.constexpr(2.0**-3)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _rounded(x):
    """To nearest and ties to even; what becomes zero keeps its sign."""
    whole = (x + _ROUNDER) - _ROUNDER
    return (_bits(whole) | (_bits(x) & _BITS_OF_MINUS_ZERO)).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_e4m3(x):
    """The bits of ``x``, at most 448 but for rounding, as float8_e4m3fn, to nearest and ties to even."""
    sign = (_bits(x) >> 24) & 0x80
    size = _bits(x) & 0x7FFFFFFF
    # Below the smallest normal number the last place is always 2**-9: the sum's last place is as large.
    denormal = _bits(size.to(tl.float32, bitcast=True) + 16384.0) - 0x46800000
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    return (tl.where(size < (121 << 23), denormal, normal) | sign).to(tl.int8)


@triton.jit
def _e4m3_to_fp32(bits):
    # As the bits of a float16, whose exponents are larger by 8.
    halves = (bits.to(tl.int16) << 7) & -0x4001
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _between_e4m3(x, noise):
    """``x`` rounded down or up to a number of float8_e4m3fn, as ``noise`` between -1/2 and 1/2 says."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    power = (_bits(x) & _BITS_OF_INFINITY).to(tl.float32, bitcast=True)
    spacing = tl.maximum(power, _SMALLEST_E4M3) * _EPS_E4M3
    return _rounded(tl.div_rn(x, spacing) + noise) * spacing


@triton.jit
def _number(x, noise, TOP: tl.constexpr, IS_FLOAT: tl.constexpr, IS_STOCHASTIC: tl.constexpr):
    """The number of the grid for ``x``, as int8."""
    # Of a chunk that is not finite anything may be written.
    x = tl.where(x == x, x, 0.0)
    if IS_FLOAT:
        if IS_STOCHASTIC:
            x = _between_e4m3(x, noise)
        number = _round_to_e4m3(x)
    else:
        if IS_STOCHASTIC:
            x = tl.minimum(tl.maximum(_rounded(x + noise), -TOP), TOP)
        else:
            x = _rounded(x)
        number = x.to(tl.int8)
    return number


@triton.jit
def _value(number, IS_FLOAT: tl.constexpr):
    if IS_FLOAT:
        value = _e4m3_to_fp32(number)
    else:
        value = number.to(tl.float32)
    return value


@triton.jit
def _places(chunks, half, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program: its chunks, which of them there are, the place of each value in its half, which there are."""
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    place = tl.arange(0, BLOCK)
    exists = (chunk < chunks)[:, None] & (place < half)[None, :]
    return chunk.to(tl.int64), chunk < chunks, place[None, :], exists


@triton.jit(do_not_specialize=["chunks"])
def _encode(
    values, values_stride, steps, payload, message_bytes, noise, chunks, half,
    TOP: tl.constexpr, IS_FLOAT: tl.constexpr, IS_PACKED: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
    SUBTRACTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encode some chunks of one message; ``SUBTRACTS``: also take what was encoded away from ``values``."""
    message = tl.program_id(1).to(tl.int64)
    chunk, chunk_exists, place, exists = _places(chunks, half, CHUNKS, BLOCK)
    low_at = values + message * values_stride + chunk[:, None] * (2 * half) + place
    low = tl.load(low_at, mask=exists, other=0.0)
    high = tl.load(low_at + half, mask=exists, other=0.0)

    peak = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    is_nan = tl.max(((low != low) | (high != high)).to(tl.int32), axis=1)
    peak = tl.where(is_nan != 0, float("nan"), peak)
    step = tl.div_rn(peak, tl.full(peak.shape, TOP, tl.float32))
    # The next number below, where it was rounded up.
    step = tl.where(step * TOP > peak, (_bits(step) - 1).to(tl.float32, bitcast=True), step)
    tl.store(steps + message * (message_bytes // 4) + chunk, step, mask=chunk_exists)
    factor = tl.div_rn(tl.full(peak.shape, 1.0, tl.float32), peak) * TOP
    factor = tl.where(peak < float("inf"), tl.minimum(factor, _LARGEST_FP32), 0.0)[:, None]

    low_noise, high_noise = low, high
    if IS_STOCHASTIC:
        noise_at = noise + (message * chunks + chunk[:, None]) * (2 * half) + place
        low_noise = tl.load(noise_at, mask=exists, other=0).to(tl.float32) * _NOISE_UNIT
        high_noise = tl.load(noise_at + half, mask=exists, other=0).to(tl.float32) * _NOISE_UNIT
    low_number = _number(low * factor, low_noise, TOP, IS_FLOAT, IS_STOCHASTIC)
    high_number = _number(high * factor, high_noise, TOP, IS_FLOAT, IS_STOCHASTIC)
    if IS_PACKED:
        bytes_at = payload + message * message_bytes + chunks * 4 + chunk[:, None] * half + place
        tl.store(bytes_at, (low_number & 15) | (high_number << 4), mask=exists)
    else:
        bytes_at = payload + message * message_bytes + chunks * 4 + chunk[:, None] * (2 * half) + place
        tl.store(bytes_at, low_number, mask=exists)
        tl.store(bytes_at + half, high_number, mask=exists)
    if SUBTRACTS:
        tl.store(low_at, low - _value(low_number, IS_FLOAT) * step[:, None], mask=exists)
        tl.store(low_at + half, high - _value(high_number, IS_FLOAT) * step[:, None], mask=exists)


@triton.jit(do_not_specialize=["chunks", "messages"])
def _decode(
    out, out_stride, steps, payload, message_bytes, messages, chunks, half,
    IS_FLOAT: tl.constexpr, IS_PACKED: tl.constexpr, ADDS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode some chunks of one message to ``out``; ``ADDS``: add those of ``messages`` messages to it, in order."""
    message = tl.program_id(1).to(tl.int64)
    chunk, chunk_exists, place, exists = _places(chunks, half, CHUNKS, BLOCK)
    low_at = out + message * out_stride + chunk[:, None] * (2 * half) + place
    low = tl.zeros((CHUNKS, BLOCK), tl.float32)
    high = tl.zeros((CHUNKS, BLOCK), tl.float32)
    if ADDS:
        low = tl.load(low_at, mask=exists, other=0.0)
        high = tl.load(low_at + half, mask=exists, other=0.0)
    for _ in range(messages):
        step = tl.load(steps + message * (message_bytes // 4) + chunk, mask=chunk_exists, other=0.0)[:, None]
        if IS_PACKED:
            bytes_at = payload + message * message_bytes + chunks * 4 + chunk[:, None] * half + place
            both = tl.load(bytes_at, mask=exists, other=0)
            low_number = (both << 4) >> 4
            high_number = both >> 4
        else:
            bytes_at = payload + message * message_bytes + chunks * 4 + chunk[:, None] * (2 * half) + place
            low_number = tl.load(bytes_at, mask=exists, other=0)
            high_number = tl.load(bytes_at + half, mask=exists, other=0)
        if ADDS:
            low += _value(low_number, IS_FLOAT) * step
            high += _value(high_number, IS_FLOAT) * step
        else:
            low = _value(low_number, IS_FLOAT) * step
            high = _value(high_number, IS_FLOAT) * step
        message += 1
    tl.store(low_at, low, mask=exists)
    tl.store(low_at + half, high, mask=exists)


@dataclass(frozen=True)
class TritonKernels:
    """Implements :class:`overlap.hooks.wires.row_kernels.RowKernels`."""

    codec: RowCodec

    @staticmethod
    def can_encode(codec: RowCodec) -> bool:
        return codec.chunk_numel <= _LARGEST_CHUNK

    def encode(self, values: Tensor, messages: Tensor, generator: torch.Generator | None, *, subtracts: bool) -> None:
        codec = self.codec
        if values.numel() == 0:
            return
        # Rows of as many numbers as there are: chunks are multiples of four.
        noise = values if generator is None else draw(len(values), codec.numel, values.device, generator)
        with torch.cuda.device_of(values):
            _encode[self._grid(len(values))](
                values, values.stride(0), *self._fields(messages), noise, codec.chunks,
                codec.chunk_numel // 2, TOP=float(codec.grid.top), IS_STOCHASTIC=generator is not None,
                SUBTRACTS=subtracts, **self._options,
            )  # fmt: skip

    def decode(self, messages: Tensor, out: Tensor) -> None:
        if out.numel() > 0:
            self._decode(messages, out, out.stride(0), rows=len(messages), each=1, adds=False)

    def add(self, messages: Tensor, total: Tensor) -> None:
        if total.numel() > 0 and len(messages) > 0:
            self._decode(messages, total, 0, rows=1, each=len(messages), adds=True)

    def _decode(self, messages: Tensor, out: Tensor, out_stride: int, *, rows: int, each: int, adds: bool) -> None:
        codec = self.codec
        with torch.cuda.device_of(out):
            _decode[self._grid(rows)](
                out, out_stride, *self._fields(messages), each, codec.chunks, codec.chunk_numel // 2, ADDS=adds,
                **self._options,
            )  # fmt: skip

    def _fields(self, messages: Tensor) -> tuple[Tensor, Tensor, int]:
        """The messages as the dtypes of their fields, and the distance of two of them in bytes."""
        (steps_dtype, _), (payload_dtype, _) = self.codec.fields
        return messages.view(steps_dtype), messages.view(payload_dtype), messages.stride(0)

    @property
    def _options(self) -> dict[str, Any]:
        grid, block = self.codec.grid, triton.next_power_of_2(self.codec.chunk_numel // 2)
        return {
            "IS_FLOAT": grid.is_float,
            "IS_PACKED": grid.bits == 4,
            "CHUNKS": self._chunks_at_once,
            "BLOCK": block,
            # A product and a sum fused are rounded once.
            "enable_fp_fusion": False,
        }

    @property
    def _chunks_at_once(self) -> int:
        return max(1, _PROGRAM_NUMEL // (2 * int(triton.next_power_of_2(self.codec.chunk_numel // 2))))

    def _grid(self, rows: int) -> tuple[int, int]:
        return int(triton.cdiv(self.codec.chunks, self._chunks_at_once)), rows
