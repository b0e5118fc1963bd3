"""Messages made of a row of numbers for each chunk of values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from overlap._torch.device import has_streams
from overlap.hooks.segments import round_up
from overlap.hooks.wires.wire import Codec, Combine

__all__ = ["BlockCodec", "Field", "codecs_in_runs"]

# Values at a time on a CPU, so that they stay in the cache between two passes over them.
_BLOCK_NUMEL = 256 * 1024
# As many rows as there are; twice that still fits 64 bits.
_EVERYTHING = 2**60


class Field(NamedTuple):
    """What a message holds of each chunk."""

    dtype: torch.dtype
    numel: int
    """Numbers for a chunk."""


class BlockCodec(Codec):
    """A message holds its fields one after another, each of them for all chunks.

    Many chunks, of one message or of several, are encoded or decoded at once: all of them where the device has streams,
    as many as stay in the cache on a CPU.
    """

    chunks: int
    chunk_numel: int

    @property
    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """What the message holds, in order."""

    @abstractmethod
    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        """Encode ``values``, fp32 of shape ``(messages, chunks, chunk_numel)``, into ``fields``.

        Those are views of shape ``(messages, chunks, n)`` of the messages.
        """

    @abstractmethod
    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        """Decode ``fields`` to ``out``, both as for :meth:`write`."""

    @property
    def numel(self) -> int:
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return round_up(self.chunks * sum(field.dtype.itemsize * field.numel for field in self.fields))

    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        self.encode_rows(values[None], message[None], generator)

    def encode_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None:
        for block, fields in self._blocks(values, messages):
            self.write(block, fields, generator)

    def subtract_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None:
        for block, fields in self._blocks(values, messages, changes=True):
            self.write(block, fields, generator)
            decoded = torch.empty_like(block)
            self.read(fields, decoded)
            block.sub_(decoded)

    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        self.decode_rows(message[None], out[None], combine)

    def decode_rows(self, messages: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        for block, fields in self._blocks(out, messages, changes=True):
            decoded = block if combine is None else torch.empty_like(block)
            self.read(fields, decoded)
            if combine is not None:
                combine(block, decoded)

    def add_rows(self, messages: Tensor, total: Tensor, *, alpha: float = 1.0) -> None:
        for block, fields in self._blocks(total[None], messages, changes=True):
            decoded = torch.empty(block.shape, dtype=total.dtype, device=total.device)
            self.read(fields, decoded)
            _add_one_by_one(block[0], decoded, alpha)

    def _blocks(
        self, values: Tensor, messages: Tensor, *, changes: bool = False
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Views ``(messages, chunks, n)`` of some chunks at a time: their values, their part of each field.

        One row of ``values`` stands for a row for each message, all of them the same one. Where one row is short, the
        chunks that are not whole are a copy, where several are, all chunks, so that rows come one after another;
        ``changes``: what becomes of it is copied back.
        """
        count = len(messages)
        if self.chunks == 0 or count == 0:
            return
        fields, start = [], 0
        for dtype, numel in self.fields:
            end = start + self.chunks * numel * dtype.itemsize
            fields.append(messages[:, start:end].view(dtype).view(count, self.chunks, numel))
            start = end
        given = values.size(-1)
        # Where kernels are launched, one copy costs less than to launch them twice.
        is_in_place = given == self.numel or (len(values) == 1 and not has_streams(values.device))
        whole = given // self.chunk_numel if is_in_place else 0
        head, tail = values.split_with_sizes([whole * self.chunk_numel, given - whole * self.chunk_numel], dim=-1)
        if whole:
            yield from self._cut(head, [field[:, :whole] for field in fields])
        if whole < self.chunks:
            rest = pad(tail, (0, (self.chunks - whole) * self.chunk_numel - tail.size(-1)))
            yield from self._cut(rest, [field[:, whole:] for field in fields])
            if changes:
                tail.copy_(rest[:, : tail.size(-1)])

    def _cut(self, values: Tensor, fields: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """As :meth:`_blocks`, of whole chunks."""
        count, chunks, _ = fields[0].shape
        views = [values.expand(count, -1).view(count, chunks, self.chunk_numel), *fields]
        # Several whole messages, or a part of one.
        messages_at_once = _at_once(self.numel, values.device)
        chunks_at_once = _at_once(self.chunk_numel, values.device)
        for some in zip(*(view.split(messages_at_once) for view in views), strict=True):
            for block, *fields in zip(*(view.split(chunks_at_once, dim=1) for view in some), strict=True):
                yield block, tuple(fields)


def codecs_in_runs(
    codecs: Sequence[Codec | None], ranks: Iterable[int], device: torch.device
) -> Iterator[tuple[Codec, list[int]]]:
    """``ranks``, in their order, in runs of one codec, as many as are encoded or decoded at once, without those that
    have none."""
    for codec, alike in groupby(ranks, key=lambda rank: codecs[rank]):
        if codec is None:
            continue
        run = list(alike)
        size = min(_at_once(codec.numel, device), len(run))
        for start in range(0, len(run), size):
            yield codec, run[start : start + size]


def _at_once(numel: int, device: torch.device) -> int:
    """How many rows of ``numel`` values to work on at once."""
    return _EVERYTHING if has_streams(device) else max(1, _BLOCK_NUMEL // numel)


def _add_one_by_one(total: Tensor, summands: Tensor, alpha: float) -> None:
    """Add ``alpha`` times each of ``summands`` to ``total``: on a CPU one after another, all by one operator."""
    if len(summands) == 1:
        total.add_(summands[0], alpha=alpha)
    elif has_streams(total.device):
        total.add_(summands.mul_(alpha).sum(dim=0))
    else:
        total[None].index_add_(0, torch.zeros(len(summands), dtype=torch.int64), summands, alpha=alpha)
