"""The bases of all wires: options, and codecs, whose messages are a row of numbers for each chunk of values. The wires
themselves, and how each encodes, are in ``formats.py``."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from overlap._torch.device import has_streams
from overlap.hooks.segments import round_up

# Values at a time on a CPU, so that they stay in the cache between two passes over them.
_BLOCK_NUMEL = 256 * 1024


Fields = tuple[Tensor, ...]
"""Views of messages, ``(..., chunks, n)`` for each field: see :meth:`Codec.fields_in`."""
Messages = Tensor | Fields


class Field(NamedTuple):
    """Numbers that a message holds of each chunk."""

    dtype: torch.dtype
    numel: int
    """How many there are for a chunk."""


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes rows of ``numel`` values as messages of ``message_bytes`` bytes, and decodes them.

    Values are cut into ``chunks`` of ``chunk_numel``. A message holds its fields in order, each of them for all chunks.
    If some of the values are not finite, neither are some of the decoded ones.

    Rows of values are fp32, messages uint8. Rows may be shorter than ``numel``, all of them alike: zeros follow, which
    are sent, but not stored. All rows are encoded or decoded at once if the device has streams; on a CPU as many as
    stay in the cache. A codec may keep constants on the device, so each user makes its own.
    """

    chunks: int
    chunk_numel: int

    @property
    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """The contents of a message, in order."""

    @abstractmethod
    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        """Encode ``values``, shape ``(messages, chunks, chunk_numel)``, into ``fields``, ``(messages, chunks, n)``.

        ``generator``, on the device of ``values``, rounds stochastically; without one rounding is to nearest.
        """

    @abstractmethod
    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        """Decode ``fields`` to ``out``, both as for :meth:`write`."""

    def round(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> Tensor:
        """As :meth:`write`; returns what :meth:`read` would."""
        self.write(values, fields, generator)
        decoded = torch.empty_like(values)
        self.read(fields, decoded)
        return decoded

    @functools.cached_property
    def numel(self) -> int:
        """Values of a message, padding included."""
        return self.chunks * self.chunk_numel

    @functools.cached_property
    def message_bytes(self) -> int:
        """A multiple of 16, so that messages can follow each other; 0 for no values."""
        return round_up(sum(self.chunks * field.dtype.itemsize * field.numel for field in self.fields))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """Bytes of each field of a message, and of its end."""
        sizes = [self.chunks * field.dtype.itemsize * field.numel for field in self._fields]
        return [*sizes, self.message_bytes - sum(sizes)]

    @functools.cached_property
    def _fields(self) -> tuple[Field, ...]:
        return self.fields

    def fields_in(self, messages: Tensor) -> Fields:
        """The fields of ``messages``, of shape ``(..., message_bytes)``; whoever encodes and decodes the same messages
        several times gives these in their place."""
        parts = messages.split_with_sizes(self._sizes, dim=-1)
        return tuple(
            part.view(dtype).view(*messages.shape[:-1], self.chunks, numel)
            for part, (dtype, numel) in zip(parts, self._fields, strict=False)
        )

    def encode_rows(self, values: Tensor, messages: Messages, generator: torch.Generator | None = None) -> None:
        """Write each row of ``values``, shape ``(n, numel)``, into one of ``messages``, ``(n, message_bytes)``."""
        for block, fields in self._blocks(values, messages):
            self.write(block, fields, generator)

    def subtract_rows(self, values: Tensor, messages: Messages, generator: torch.Generator | None = None) -> None:
        """As :meth:`encode_rows`, and leave in ``values`` the rounding errors."""
        for block, fields in self._blocks(values, messages, changes=True):
            block.sub_(self.round(block, fields, generator))

    def decode_rows(self, messages: Messages, out: Tensor) -> None:
        """Write the values of each of ``messages``, shape ``(n, message_bytes)``, to a row of ``out``."""
        for block, fields in self._blocks(out, messages, changes=True):
            self.read(fields, block)

    def add_rows(self, messages: Messages, total: Tensor) -> None:
        """Add the values of each message to ``total``, shape ``(numel,)``.

        On a CPU in their order; where there are streams, they may be added up first.
        """
        for block, fields in self._blocks(total[None], messages, changes=True):
            decoded = torch.empty(block.shape, dtype=total.dtype, device=total.device)
            self.read(fields, decoded)
            if len(decoded) == 1:
                block[0].add_(decoded[0])
            elif has_streams(total.device):
                block[0].add_(decoded.sum(dim=0))
            else:  # One after another, by one operator.
                first = torch.zeros(len(decoded), dtype=torch.int64, device=total.device)
                block[0][None].index_add_(0, first, decoded)

    def _blocks(self, values: Tensor, messages: Messages, *, changes: bool = False) -> Iterator[tuple[Tensor, Fields]]:
        """Views ``(messages, chunks, n)`` of some chunks at a time: their values, their part of each field.

        One row of ``values`` stands for a row for each message, all of them the same one. Of one short row the last
        chunks are copied, of several short rows all chunks; ``changes``: the caller writes to them, so they are copied
        back.
        """
        if self.chunks == 0:
            return
        fields = self.fields_in(messages) if isinstance(messages, Tensor) else messages
        count, given = len(fields[0]), values.size(-1)
        if count == 0:
            return
        is_at_once = has_streams(values.device)
        # Where kernels are launched, one copy costs less than to launch them twice.
        whole = given // self.chunk_numel if given == self.numel or (len(values) == 1 and not is_at_once) else 0
        end = whole * self.chunk_numel
        rest = values[:, end:] if whole == self.chunks else pad(values[:, end:], (0, self.numel - given))
        if is_at_once:
            yield (
                (values if whole else rest).expand(count, -1).view(count, self.chunks, self.chunk_numel),
                fields,
            )
        else:
            yield from self._cut(values[:, :end], [field[:, :whole] for field in fields])
            yield from self._cut(rest, [field[:, whole:] for field in fields])
        if changes and whole < self.chunks:
            values[:, end:].copy_(rest[:, : given - end])

    def _cut(self, values: Tensor, fields: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """As :meth:`_blocks`, of whole chunks, which may be none: several messages, or a part of one."""
        count, chunks, _ = fields[0].shape
        if chunks:
            block = values.expand(count, -1).view(count, chunks, self.chunk_numel)
            messages_at_once = max(1, _BLOCK_NUMEL // self.numel)
            chunks_at_once = max(1, _BLOCK_NUMEL // self.chunk_numel)
            for some in zip(*(view.split(messages_at_once) for view in (block, *fields)), strict=True):
                for part, *of_part in zip(*(view.split(chunks_at_once, dim=1) for view in some), strict=True):
                    yield part, tuple(of_part)


class Wire(ABC):
    """How values are sent in fewer bytes; the same object serves gradients, parameters and averages.

    It holds options only. They are all in its ``repr``, which is valid code, and which ranks compare at registration; a
    wire of your own is a frozen dataclass with ``repr=False``. Rounding errors are kept by the user of a wire.

    >>> wire = Int8(chunk=256)
    >>> isinstance(wire, Wire), wire
    (True, Int8(chunk=256))
    >>> registration = chain(Quantize(wire)).register(ddp)
    """

    @property
    def is_stochastic(self) -> bool:
        """Whether encoding needs a generator."""
        return False

    @abstractmethod
    def codec(self, numel: int) -> Codec:
        """The codec of messages of at least ``numel`` values."""

    def __repr__(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = {field: getattr(self, field.name) for field in fields}
        options = [repr(value) for field, value in values.items() if not field.kw_only]
        for field, value in values.items():
            if field.kw_only and value != field.default:
                options.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(options)})"
