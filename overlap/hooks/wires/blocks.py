"""Messages made of a row of numbers for each chunk of values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap.hooks.segments import round_up
from overlap.hooks.wires.row_kernels import RowKernels
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

    def kernels(self, values: Tensor) -> RowKernels | None:
        """Kernels that take the place of :meth:`write` and :meth:`read` for ``values``."""
        return None

    @property
    def numel(self) -> int:
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return round_up(self.chunks * sum(field.dtype.itemsize * field.numel for field in self.fields))

    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        self.encode_rows(values[None], message[None], generator)

    def encode_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None:
        if (kernels := self.kernels(values)) is not None:
            kernels.encode(values, messages, generator, subtracts=False)
            return
        for block, fields in self._blocks(values, messages):
            self.write(block, fields, generator)

    def subtract_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None:
        if (kernels := self.kernels(values)) is not None:
            kernels.encode(values, messages, generator, subtracts=True)
            return
        super().subtract_rows(values, messages, generator)

    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        self.decode_rows(message[None], out[None], combine)

    def decode_rows(self, messages: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        if combine is None and (kernels := self.kernels(out)) is not None:
            kernels.decode(messages, out)
            return
        for block, fields in self._blocks(out, messages):
            decoded = block if combine is None else torch.empty_like(block)
            self.read(fields, decoded)
            if combine is not None:
                combine(block, decoded)

    def add_rows(self, messages: Tensor, total: Tensor, *, alpha: float = 1.0) -> None:
        if alpha == 1.0 and (kernels := self.kernels(total)) is not None:
            kernels.add(messages, total)
            return
        # As a row for each message, all of them the same one.
        same = total.expand(len(messages), -1)
        for block, fields in self._blocks(same, messages):
            decoded = torch.empty(block.shape, dtype=total.dtype, device=total.device)
            self.read(fields, decoded)
            _add_one_by_one(block[0], decoded, alpha)

    def _blocks(self, values: Tensor, messages: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Views ``(messages, chunks, n)`` of some chunks at a time: their values, their part of each field."""
        count = len(messages)
        if self.chunks == 0 or count == 0:
            return
        views, start = [values.view(count, self.chunks, self.chunk_numel)], 0
        for dtype, numel in self.fields:
            end = start + self.chunks * numel * dtype.itemsize
            views.append(messages[:, start:end].view(dtype).view(count, self.chunks, numel))
            start = end
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
