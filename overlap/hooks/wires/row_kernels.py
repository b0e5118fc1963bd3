"""What kernels of our own are given, and what they do."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

__all__ = ["NumberGrid", "RowCodec", "RowKernels"]


class NumberGrid(Protocol):
    """A :class:`overlap.hooks.wires.chunks.Grid`, as far as kernels know it."""

    bits: int
    top: float
    is_float: bool


class RowCodec(Protocol):
    """A :class:`overlap.hooks.wires.chunks.ChunkCodec`, as far as kernels know it."""

    @property
    def grid(self) -> NumberGrid: ...

    @property
    def chunks(self) -> int: ...

    @property
    def chunk_numel(self) -> int: ...

    @property
    def fields(self) -> tuple[tuple[torch.dtype, int], ...]: ...

    @property
    def numel(self) -> int: ...

    @property
    def message_bytes(self) -> int: ...

    def __hash__(self) -> int: ...

    def resized(self, chunks: int, chunk_numel: int) -> Self: ...

    def subtract_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None: ...

    def add_rows(self, messages: Tensor, total: Tensor, *, alpha: float = 1.0) -> None: ...


class RowKernels(Protocol):
    """Kernels for one codec; tensors are as for :class:`overlap.hooks.wires.wire.Codec`."""

    def encode(
        self, values: Tensor, messages: Tensor, generator: torch.Generator | None, *, subtracts: bool
    ) -> None: ...

    def decode(self, messages: Tensor, out: Tensor) -> None: ...

    def add(self, messages: Tensor, total: Tensor) -> None: ...
