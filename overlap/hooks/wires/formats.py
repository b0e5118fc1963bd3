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
half: a whole number is unchanged. The bias is at most 2**-16 of a step.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from overlap._checks import as_number, is_one_of, short_repr
from overlap._torch.device import has_streams
from overlap.errors import ConfigurationError
from overlap.hooks.wires.codec import Codec, Field, Wire

# Chunks are multiples of it, in values: in 4 bits its halves share bytes.
_MULTIPLE = 8
# An index has 16 bits, with a sign.
_LARGEST_CHUNK = 2**15
_ODD = 0x0001_0001_0001_0001


@dataclass(frozen=True, repr=False)
class CastWire(Wire):
    """Values in another floating-point dtype."""

    dtype: ClassVar[torch.dtype]

    def codec(self, numel: int) -> CastCodec:
        return CastCodec(numel, 1, self.dtype)


@dataclass(frozen=True, repr=False)
class Float16(CastWire):
    """``float16``: 0.5 of fp32, with 11 bits of precision up to 65,504.

    A value is off by at most 2**-11 of itself, below 6.1e-5 by 2**-25. Larger values become infinite: scale them, as
    ``torch.amp.GradScaler`` does, which then sees the overflow.

    >>> Float16()
    Float16()
    """

    dtype = torch.float16


@dataclass(frozen=True, repr=False)
class BFloat16(CastWire):
    """``bfloat16``: 0.5 of fp32, with its range and 8 bits of precision.

    A value is off by at most 2**-8 of itself. Values above 3.39e38 become infinite.

    >>> BFloat16()
    BFloat16()
    """

    dtype = torch.bfloat16


@dataclass(frozen=True)
class CastCodec(Codec):
    """A message holds the values one after another."""

    dtype: torch.dtype

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field(self.dtype, 1),)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        fields[0].copy_(values)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        out.copy_(fields[0])


def check_chunk(chunk: object, *, largest: int | None = None) -> None:
    """Raises: ConfigurationError: ``chunk`` is not a positive multiple of 8, at most ``largest``."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk <= 0 or chunk % _MULTIPLE:
        raise ConfigurationError(f"chunk is {short_repr(chunk)}: give a positive multiple of {_MULTIPLE}, such as 512")
    if largest is not None and chunk > largest:
        raise ConfigurationError(f"chunk is {short_repr(chunk)}: give at most {largest}")


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

    bits: ClassVar[int]
    """Of a number."""
    top: ClassVar[float]
    """The largest number, to which a chunk's largest magnitude is scaled."""

    @abstractmethod
    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        """Write ``scaled``, shape ``(..., chunk_numel)``, rounded, to ``payload``, int8 of shape ``(..., bytes)``.

        ``scaled`` may be overwritten; integers leave their numbers there. At most ``top`` in magnitude, or not finite,
        and then any number will do.
        """

    @abstractmethod
    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        """Write the numbers of ``payload`` times ``step`` to ``out``, fp32 of shape ``(..., chunk_numel)``."""

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.float32, 1), Field(torch.int8, self.chunk_numel * self.bits // 8)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        self._write(values, fields, generator)

    def _write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> Tensor:
        """:meth:`write`; returns what :meth:`pack` has left."""
        step, payload = fields
        if has_streams(values.device):
            peak = torch.linalg.vector_norm(values, math.inf, dim=-1, keepdim=True)
        else:  # There the norm takes ten times as long.
            peak = values.abs().amax(dim=-1, keepdim=True)
        if (constants := self._constants.get(values.device)) is None:
            constants = tuple(peak.new_full((), one) for one in (torch.finfo(torch.float32).tiny, self.top, 0.0))
            self._constants[values.device] = constants
        # Divided by a tensor: by a number, some devices multiply by its inverse, which rounds twice. With the smallest
        # normal number added, which changes no step above 4e-31, the step of zeros is not zero.
        torch.addcdiv(constants[0], peak, constants[1], out=step)
        self.pack(scaled := values / step, payload, generator)
        return scaled

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        step, payload = fields
        self.unpack(payload, step, out)

    @functools.cached_property
    def _constants(self) -> dict[torch.device, tuple[Tensor, ...]]:
        return {}


class _Integers(ChunkCodec):
    def round(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> Tensor:
        numbers = self._write(values, fields, generator)
        zero = self._constants[values.device][2]
        return torch.addcmul(zero, numbers, fields[0], out=numbers)  # A product would be -0.0 where 0 is read.


class _EightBits(_Integers):
    bits = 8
    top = 127

    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        payload.copy_(_rounded(scaled, self.top, generator))

    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        torch.mul(payload, step, out=out)


class _FourBits(_Integers):
    """A byte is ``low + 16 * high``, of a number of the chunk's first half and one of its second."""

    bits = 4
    top = 7

    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        low, high = _rounded(scaled, self.top, generator).chunk(2, dim=-1)
        payload.copy_(low.add(high, alpha=16))

    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        low, high = out.chunk(2, dim=-1)
        numbers = (payload + 8).bitwise_right_shift_(4)
        torch.mul(numbers, step, out=high)
        torch.mul(torch.sub(payload, numbers, alpha=16, out=numbers), step, out=low)


class _E4M3(ChunkCodec):
    bits = 8
    top = 448

    def pack(self, scaled: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        payload.view(torch.float8_e4m3fn).copy_(scaled)

    def unpack(self, payload: Tensor, step: Tensor, out: Tensor) -> None:
        # As the bits of a float16, whose exponents are larger by 8; converting float8 on a CPU takes ten times as long.
        halves = payload.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(halves.view(torch.float16)).mul_(2.0**8).mul_(step)


def _rounded(values: Tensor, top: float, generator: torch.Generator | None) -> Tensor:
    """``values``, at most ``top`` in magnitude, as integers, in place: to nearest (ties to even), or stochastically."""
    if generator is None:
        return values.round_()
    words = torch.empty(*values.shape[:-1], values.size(-1) // 4, dtype=torch.int64, device=values.device)
    # The whole range: without a beginning the highest bit would always be 0.
    noise = words.random_(-(2**63), None, generator=generator).bitwise_or_(_ODD).view(torch.int16)
    return values.add_(noise, alpha=2.0**-16).round_().clamp_(-top, top)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChunkWire(Wire):
    """Numbers of a grid, with an fp32 scale for each chunk of values."""

    chunk: int = 512
    _codec: ClassVar[type[ChunkCodec]]

    def __post_init__(self) -> None:
        check_chunk(self.chunk)

    def codec(self, numel: int) -> ChunkCodec:
        return self._codec(*cut(numel, self.chunk))


@dataclass(frozen=True, kw_only=True, repr=False)
class IntegerWire(ChunkWire):
    """Integers, rounded to nearest or, stochastically, up or down with an error that is zero on average."""

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_one_of(self.rounding, "nearest", "stochastic"):
            raise ConfigurationError(f"rounding is {short_repr(self.rounding)}: give 'nearest' or 'stochastic'")

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(IntegerWire):
    """Integers of 8 bits with an fp32 scale for each chunk: 0.252 of fp32.

    A value is off by at most half a step, where a step is 1/127 of its chunk's largest magnitude; by a whole step with
    stochastic rounding. If a chunk holds a value that is not finite, none of its decoded values is finite.

    Args:
        chunk: values that share a scale, at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    >>> Int8(chunk=256)
    Int8(chunk=256)
    """

    _codec = _EightBits


@dataclass(frozen=True, kw_only=True, repr=False)
class Int4(IntegerWire):
    """Integers of 4 bits, -7 to 7, with an fp32 scale for each chunk: 0.127 of fp32. Otherwise as :class:`Int8`.

    A value is off by at most half a step, where a step is 1/7 of its chunk's largest magnitude.

    >>> Int4(rounding="stochastic")
    Int4(rounding='stochastic')
    """

    _codec = _FourBits


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8(ChunkWire):
    """``float8_e4m3fn`` with an fp32 scale for each chunk: 0.252 of fp32. Otherwise as :class:`Int8`.

    A value is off by at most 1/16 of itself, or 1/458,752 of its chunk's largest magnitude if that is more. So it is
    closer than :class:`Int8` for small values of a chunk, less close for large ones.

    Args:
        chunk: values that share a scale, at most; a multiple of 8.

    The format is that of Micikevicius et al., "FP8 formats for deep learning", 2022.

    >>> Float8()
    Float8()
    """

    _codec = _E4M3


@dataclass(frozen=True, repr=False)
class TopK(Wire):
    """The values of largest magnitude in each chunk, in ``bfloat16``, and zero for the others: ``density`` of fp32.

    A value that is sent is off by at most 2**-8 of itself and takes 4 bytes, 2 of them for its index; the others become
    zero, so use it with error feedback: without, they are never sent. Values that are not finite count as the largest,
    and arrive as such.

    Args:
        density: the part of the values to send, above 0 and at most 1; at least one of each chunk.
        chunk: values to select from, at most; a multiple of 8, at most 32,768.

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
        density = as_number(self.density)
        if density is None or not 0 < density <= 1:
            raise ConfigurationError(
                f"density is {short_repr(self.density)}: give the part of the values to send, above 0 and at most 1, "
                "such as 0.01"
            )
        check_chunk(self.chunk, largest=_LARGEST_CHUNK)

    def codec(self, numel: int) -> TopKCodec:
        chunks, chunk_numel = cut(numel, self.chunk)
        return TopKCodec(chunks, chunk_numel, max(1, round(self.density * chunk_numel)))


@dataclass(frozen=True)
class TopKCodec(Codec):
    """A message holds the largest values of each chunk, then their indices in their chunks."""

    kept: int
    """Of each chunk."""

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.bfloat16, self.kept), Field(torch.int16, self.kept)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        sent, indices = fields
        largest = values.abs().topk(self.kept, dim=-1, sorted=False).indices
        sent.copy_(values.gather(-1, largest))
        indices.copy_(largest)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        sent, indices = fields
        out.zero_().scatter_(-1, indices.long(), sent.float())
