"""The wires: half precision, integers and 8-bit floats with a scale for each chunk, and a chunk's largest values.

[Note: chunks on a grid]

The scheme of QSGD (Alistarh et al., 2017), with a chunk's largest magnitude in place of its norm: a value ``x`` of a
chunk whose largest magnitude is ``peak`` becomes the number of a grid nearest to ``x / step``, in ``-top .. top``, and
is decoded as ``number * step``, where ``step`` is ``peak / top`` in fp32. Numbers of the grid times a step, zero among
them, are decoded exactly; the largest values and constant chunks up to fp32's last place, so that in 8 bits fp32's very
largest number becomes infinite. If a chunk holds a value that is not finite, none of its decoded values is finite.

[Note: the noise of stochastic rounding]

A number that has noise added to it, uniform between minus a half and a half, and is then rounded to nearest, is rounded
up or down with its own mean. Drawing the noise is most of what stochastic rounding costs on a CPU, so four numbers are
taken from each 64 bits of the generator. They are made odd, so that they are symmetric around zero and never reach a
half: a whole number is unchanged.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from overlap._checks import as_number, told
from overlap._torch.device import has_streams
from overlap.errors import ConfigurationError
from overlap.hooks.wires.codec import Codec, Field, RoundingWire

__all__ = [
    "AffineCodec",
    "BFloat16",
    "ChunkCodec",
    "Float8",
    "Float16",
    "Int4",
    "Int8",
    "TopK",
    "add_noise_",
    "cast",
    "draw",
]

# Chunks are multiples of it, in values: in 4 bits its halves share bytes.
_MULTIPLE = 8
_AFFINE_TOP = 255
# An index has 16 bits, with a sign.
_LARGEST_CHUNK = 2**15
# Noise is odd multiples of 2**-16.
_NOISE_BITS = 16
_ODD = 0x0001_0001_0001_0001


def draw(rows: int, numel: int, device: torch.device, generator: torch.Generator, *, bits: int = _NOISE_BITS) -> Tensor:
    """Noise in units of ``2**-bits``, at most 16: odd int16 numbers below ``2**(bits - 1)``, shape ``(rows, numel)``.

    Each row begins with bits of its own, so rows are the same as when drawn one by one.
    """
    words = torch.empty(rows, -(-numel // 4), dtype=torch.int64, device=device)
    # The whole range: without a beginning the highest bit would always be 0.
    words.random_(-(2**63), None, generator=generator)
    numbers = words.view(torch.int16)
    if bits < _NOISE_BITS:
        numbers.bitwise_right_shift_(_NOISE_BITS - bits)
    words.bitwise_or_(_ODD)
    return numbers[:, :numel]


def add_noise_(values: Tensor, generator: torch.Generator, *, bits: int = _NOISE_BITS) -> Tensor:
    """Add to ``values``, shape ``(rows, ...)``, noise between minus a half and a half, odd multiples of ``2**-bits``.

    Rounded to nearest then, a value has a bias of at most ``2**-bits``, and a whole number does not change, if values
    have at most ``24 - bits`` bits before the point.
    """
    rows = len(values)
    noise = draw(rows, values.numel() // max(rows, 1), values.device, generator, bits=bits)
    return values.add_(noise.view(values.shape), alpha=2.0**-bits)


def cast(values: Tensor, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Write ``values`` to ``out`` in its dtype, rounded to nearest, or with a ``generator`` stochastically."""
    return out.copy_(values if generator is None else _between_neighbours(values, out.dtype, generator))


def _between_neighbours(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``values``, fp32, each rounded stochastically to one of the two numbers of ``dtype`` beside it."""
    of_dtype, of_fp32 = torch.finfo(dtype), torch.finfo(torch.float32)
    # The bits of the exponent alone are the largest power of two that is not larger; zero for denormal numbers.
    powers = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    # Below its smallest normal number the numbers of a dtype are equidistant. Infinity over infinity would be NaN.
    smallest = max(of_dtype.tiny, of_fp32.tiny / of_dtype.eps)
    spacing = powers.clamp_(min=smallest, max=2.0**127).mul_(of_dtype.eps)
    # No finer than the sum in fp32, so that a number of the dtype is unchanged.
    bits = min(_NOISE_BITS, round(math.log2(of_dtype.eps / of_fp32.eps)))
    return add_noise_(values / spacing, generator, bits=bits).round_().mul_(spacing)


@dataclass(frozen=True, kw_only=True, repr=False)
class CastWire(RoundingWire):
    """Values in another floating-point dtype."""

    dtype: ClassVar[torch.dtype]

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    def codec(self, numel: int) -> CastCodec:
        return CastCodec(self.dtype, numel)


@dataclass(frozen=True, kw_only=True, repr=False)
class Float16(CastWire):
    """``float16``: 0.5 of fp32, with 11 bits of precision up to 65,504.

    A value is off by at most 2**-11 of itself, below 6.1e-5 by 2**-25; by twice as much with stochastic rounding.
    Larger values become infinite: scale them, as ``torch.amp.GradScaler`` does, which then sees the overflow.

    Args:
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    >>> Float16()
    Float16()
    """

    dtype = torch.float16


@dataclass(frozen=True, kw_only=True, repr=False)
class BFloat16(CastWire):
    """``bfloat16``: 0.5 of fp32, with its range and 8 bits of precision.

    A value is off by at most 2**-8 of itself; by twice as much with stochastic rounding, or 1.2e-38 if that is more.
    Values above 3.39e38 become infinite.

    Args:
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    >>> BFloat16(rounding="stochastic")
    BFloat16(rounding='stochastic')
    """

    dtype = torch.bfloat16


@dataclass(frozen=True)
class CastCodec(Codec):
    """A message holds the values one after another."""

    dtype: torch.dtype
    chunks: int
    chunk_numel: int = 1

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field(self.dtype, 1),)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        cast(values, fields[0], generator)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        out.copy_(fields[0])


def check_chunk(chunk: object, *, largest: int | None = None) -> None:
    """Raises: ConfigurationError: ``chunk`` is not a positive multiple of 8, at most ``largest``."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk <= 0 or chunk % _MULTIPLE:
        raise ConfigurationError(f"chunk is {told(chunk)}: give a positive multiple of {_MULTIPLE}, such as 512")
    if largest is not None and chunk > largest:
        raise ConfigurationError(f"chunk is {told(chunk)}: give at most {largest}")


def cut(numel: int, chunk: int) -> tuple[int, int]:
    """Into how many chunks of equal size to cut ``numel`` values, and their size, at most ``chunk``.

    >>> cut(1000, 512)
    (2, 504)
    """
    chunks = -(-numel // chunk)
    return chunks, -(-numel // (chunks * _MULTIPLE)) * _MULTIPLE if chunks else _MULTIPLE


@dataclass(frozen=True)
class ChunkCodec(Codec):
    """A message holds the step of each chunk in fp32, then the chunks' numbers. See [Note: chunks on a grid]."""

    chunks: int
    chunk_numel: int

    bits: ClassVar[int]
    """Of a number."""
    top: ClassVar[float]
    """The largest number, to which a chunk's largest magnitude is scaled."""

    @abstractmethod
    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        """Write ``scaled``, shape ``(..., chunk_numel)``, rounded, to ``payload``, int8 of shape ``(..., bytes)``.

        ``scaled`` may be overwritten. At most ``top`` in magnitude, or not finite, and then any number will do.
        """

    @abstractmethod
    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        """Write the numbers of ``payload`` times ``step`` to ``out``, fp32 of shape ``(..., chunk_numel)``."""

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.float32, 1), Field(torch.int8, self.chunk_numel * self.bits // 8)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        step, payload = fields
        if has_streams(values.device):
            peak = torch.linalg.vector_norm(values, math.inf, dim=-1, keepdim=True)
        else:  # There the norm takes ten times as long.
            peak = values.abs().amax(dim=-1, keepdim=True)
        if (constants := self._constants.get(values.device)) is None:
            constants = peak.new_full((), torch.finfo(torch.float32).tiny), peak.new_full((), self.top)
            self._constants[values.device] = constants
        # Divided by a tensor: by a number, some devices multiply by its inverse, which rounds twice. With the smallest
        # normal number added, which changes no step above 4e-31, the step of zeros is not zero.
        torch.addcdiv(constants[0], peak, constants[1], out=step)
        self.pack(values / step, payload, generator)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        step, payload = fields
        self.unpack(payload, step, out)

    @functools.cached_property
    def _constants(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


class _EightBits(ChunkCodec):
    bits = 8
    top = 127

    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        payload.copy_(_rounded(scaled, self.top, generator))

    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        torch.mul(payload, step, out=out)


class _FourBits(ChunkCodec):
    """A byte is ``low + 16 * high``, of a number of the chunk's first half and one of its second."""

    bits = 4
    top = 7

    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        low, high = _rounded(scaled, self.top, generator).chunk(2, dim=-1)
        payload.copy_(low.add_(high, alpha=16))

    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        low, high = out.chunk(2, dim=-1)
        torch.mul((payload << 4).bitwise_right_shift_(4), step, out=low)
        torch.mul((payload + 8).bitwise_right_shift_(4), step, out=high)


class _E4M3(ChunkCodec):
    bits = 8
    top = 448

    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        if generator is not None:
            # The quotient can be a little larger than top, and would be rounded up.
            scaled.clamp_(-self.top, self.top)
        cast(scaled, payload.view(torch.float8_e4m3fn), generator)

    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        # As the bits of a float16, whose exponents are larger by 8; converting float8 on a CPU takes ten times as long.
        halves = payload.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(halves.view(torch.float16)).mul_(2.0**8).mul_(step)


def _rounded(values: Tensor, top: float, generator: torch.Generator | None) -> Tensor:
    """``values``, at most ``top`` in magnitude, as integers, in place: to nearest (ties to even), or stochastically."""
    if generator is None:
        return values.round_()
    return add_noise_(values, generator).round_().clamp_(-top, top)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChunkWire(RoundingWire):
    """Numbers of a grid, with an fp32 scale for each chunk of values."""

    chunk: int = 512
    _codec: ClassVar[type[ChunkCodec]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk)

    def codec(self, numel: int) -> ChunkCodec:
        return self._codec(*cut(numel, self.chunk))


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(ChunkWire):
    """Integers of 8 bits with an fp32 scale for each chunk: 0.252 of fp32.

    A value is off by at most half a step, 1/127 of its chunk's largest magnitude; by a whole step with stochastic
    rounding. If a chunk holds a value that is not finite, none of its decoded values is finite.

    Args:
        chunk: values that share a scale, at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    >>> Int8(chunk=256)
    Int8(chunk=256)
    """

    _codec = _EightBits


@dataclass(frozen=True, kw_only=True, repr=False)
class Int4(ChunkWire):
    """Integers of 4 bits, -7 to 7, with an fp32 scale for each chunk: 0.127 of fp32. Otherwise as :class:`Int8`.

    A value is off by at most half a step, 1/7 of its chunk's largest magnitude.

    >>> Int4(rounding="stochastic")
    Int4(rounding='stochastic')
    """

    _codec = _FourBits


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8(ChunkWire):
    """``float8_e4m3fn`` with an fp32 scale for each chunk: 0.252 of fp32. Otherwise as :class:`Int8`.

    A value is off by at most 1/16 of itself, or 1/458,752 of its chunk's largest magnitude if that is more; with
    stochastic rounding, by twice as much. So it is closer than :class:`Int8` for small values of a chunk, less close
    for large ones.

    The format is that of Micikevicius et al., "FP8 formats for deep learning", 2022.

    >>> Float8()
    Float8()
    """

    _codec = _E4M3


@dataclass(frozen=True)
class AffineCodec(Codec):
    """Integers 0 to 255, with a scale and a zero point for each chunk: 0.254 of fp32.

    ``x`` becomes ``round(x / scale) + zero_point``, where the range covers the smallest value, the largest value and
    zero. The error is at most half a scale, and zero is exact. If a value is not finite, all values that share its
    scale become NaN. A message holds scale and zero point of each chunk in fp32, then the chunks' integers.
    """

    chunks: int
    chunk_numel: int

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.float32, 2), Field(torch.uint8, self.chunk_numel)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        parameters, integers = fields
        low, high = torch.aminmax(values, dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        # Halved, so that the difference of the largest numbers does not overflow; never zero: it is a divisor.
        scale = ((high / 2 - low / 2) / (_AFFINE_TOP / 2)).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        zero_point = (-(low / scale).round()).clamp(0, _AFFINE_TOP)
        torch.cat([scale, zero_point], dim=-1, out=parameters)
        integers.copy_((values / scale).round_().add_(zero_point).clamp_(0, _AFFINE_TOP))

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        parameters, integers = fields
        scale, zero_point = parameters.split(1, dim=-1)
        torch.sub(integers, zero_point, out=out)
        out.mul_(scale)


@dataclass(frozen=True, repr=False)
class TopK(RoundingWire):
    """The values of largest magnitude in each chunk, in ``bfloat16``, and zero for the others: ``density`` of fp32.

    A value that is sent is off by at most 2**-8 of itself (twice as much with stochastic rounding) and takes 4 bytes,
    2 of them for its index; the others become zero, so use it with error feedback: without, they are never sent. Values
    that are not finite count as the largest, and arrive as such.

    Args:
        density: the part of the values to send, above 0 and at most 1; at least one of each chunk.
        chunk: values to select from, at most; a multiple of 8, at most 32,768.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    Raises:
        ConfigurationError: an argument is not one of the above.

    The largest values with error feedback: Lin et al., "Deep gradient compression", 2018. By chunks: SparseLoCo,
    arXiv 2508.15706.

    >>> TopK(0.01)
    TopK(0.01)
    """

    density: float
    chunk: int = field(default=4096, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        density = as_number(self.density)
        if density is None or not 0 < density <= 1:
            raise ConfigurationError(
                f"density is {told(self.density)}: give the part of the values to send, above 0 and at most 1, such as "
                "0.01"
            )
        check_chunk(self.chunk, largest=_LARGEST_CHUNK)

    @property
    def largest(self) -> float:
        return torch.finfo(torch.bfloat16).max

    def codec(self, numel: int) -> TopKCodec:
        chunks, chunk_numel = cut(numel, self.chunk)
        return TopKCodec(chunks, chunk_numel, max(1, round(self.density * chunk_numel)))


@dataclass(frozen=True)
class TopKCodec(Codec):
    """A message holds the largest values of each chunk, then their indices in their chunks."""

    chunks: int
    chunk_numel: int
    kept: int
    """Of each chunk."""

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.bfloat16, self.kept), Field(torch.int16, self.kept)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        sent, indices = fields
        largest = values.abs().topk(self.kept, dim=-1, sorted=False).indices
        cast(values.gather(-1, largest), sent, generator)
        indices.copy_(largest)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        sent, indices = fields
        out.zero_().scatter_(-1, indices.long(), sent.float())
