"""The largest values of each chunk, with their indices."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from overlap._checks import as_number, told
from overlap.errors import ConfigurationError
from overlap.hooks.wires.blocks import Codec, Field
from overlap.hooks.wires.numbers import cast, check_chunk, cut
from overlap.hooks.wires.wire import RoundingWire

__all__ = ["TopK", "TopKCodec"]

# An index has 16 bits, with a sign.
_LARGEST_CHUNK = 2**15


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
