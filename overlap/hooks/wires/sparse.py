"""The largest values of a chunk, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks.wires.chunks import check_chunk, cut
from overlap.hooks.wires.floats import cast
from overlap.hooks.wires.wire import Codec, Combine, RoundingWire, aligned, at_a_time

__all__ = ["TopK", "TopKCodec"]

# An index has 16 bits, with a sign.
_LARGEST_CHUNK = 2**15


@dataclass(frozen=True, repr=False)
class TopK(RoundingWire):
    """The values of largest magnitude in each chunk, in ``bfloat16``, and zero for the others: ``density`` of fp32.

    A value that is sent is off by at most 2**-8 of itself (twice as much with stochastic rounding) and takes 4 bytes,
    2 of them for its place; the others are off by themselves. So use it with error feedback: without, what is not among
    the largest is never sent. Values that are not finite count as the largest, and arrive as such.

    Args:
        density: the part of the values to send, above 0 and at most 1; of each chunk at least one.
        chunk: among how many values the largest are sought at most; a multiple of 8, at most 32,768.
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
        if isinstance(self.density, bool) or not isinstance(self.density, Real) or not 0 < self.density <= 1:
            raise ConfigurationError(
                f"density is {self.density!r}: give the part of the values to send, above 0 and at most 1, such as 0.01"
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
    """A message holds the values that each chunk sends, then their places in their chunks."""

    chunks: int
    chunk_numel: int
    kept: int
    """Of each chunk."""

    @property
    def numel(self) -> int:
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return aligned(2 * self._half_bytes)

    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        for chunk_values, sent, places in self._blocks(values, message):
            largest = chunk_values.abs().topk(self.kept, dim=1, sorted=False).indices
            cast(chunk_values.gather(1, largest), sent, generator)
            places.copy_(largest)

    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        for chunk_values, sent, places in self._blocks(out, message):
            decoded = chunk_values if combine is None else torch.empty_like(chunk_values)
            decoded.zero_().scatter_(1, places.long(), sent.float())
            if combine is not None:
                combine(chunk_values, decoded)

    @property
    def _half_bytes(self) -> int:
        """Of the values, or of their places."""
        return self.chunks * self.kept * torch.bfloat16.itemsize

    def _blocks(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of a few chunks at a time: values ``(n, chunk_numel)``, those sent and their places ``(n, kept)``."""
        if self.chunks == 0:
            return
        views = (
            values.view(self.chunks, self.chunk_numel),
            message[: self._half_bytes].view(torch.bfloat16).view(self.chunks, self.kept),
            message[self._half_bytes : 2 * self._half_bytes].view(torch.int16).view(self.chunks, self.kept),
        )
        rows = at_a_time(self.chunks, self.chunk_numel, values.device)
        yield from zip(*(view.split(rows) for view in views), strict=True)
