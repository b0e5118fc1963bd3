"""What an ATen operator reads and writes, by its schema."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# The shape of the result depends on values, or the result is a number: on a device the host waits for them.
_SYNCHRONIZING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
    aten.argwhere,
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# They say where a tensor's memory is and do nothing to it.
_METADATA = {aten.set_, aten.resize_, aten.record_stream, aten.is_same_size, aten._has_compatible_shallow_copy_type}


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one call."""

    reads: list[Tensor]
    writes: list[Tensor]
    made: list[Tensor]
    """Results that are no views of an operand."""


@dataclass(frozen=True, slots=True)
class _Schema:
    written: frozenset[int | str]
    """Places and names of the arguments that are written to."""
    touches_nothing: bool


@functools.cache
def _schema(operator: Any) -> _Schema:
    schema = operator._schema
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    results = [result.alias_info for result in schema.returns]
    is_view = bool(results) and all(alias is not None and not alias.is_write for alias in results)
    return _Schema(frozenset(written), is_view or operator.overloadpacket in _METADATA)


def operands(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operands | None:
    """What a call has read, written and made; ``None`` where it touched no memory, as a view does."""
    schema = _schema(operator)
    if schema.touches_nothing:
        return None
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, value in (*enumerate(args), *kwargs.items()):
        (writes if place in schema.written else reads).extend(tensors_in(value))
    given = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
    results = list(tensors_in(result))
    made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in given]
    if not writes and results and not made:
        return None  # A view whose schema does not say so.
    return Operands(reads, writes, made) if reads or writes or made else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that ``value`` holds."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            yield value
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def is_host_synchronization(operator: Any, args: Sequence[Any]) -> bool:
    """Whether the host would wait for a device to run ``operator``."""
    packet = operator.overloadpacket
    if packet in _SYNCHRONIZING:
        return not (packet is aten.repeat_interleave and "output_size" in str(operator._schema) and len(args) > 2)
    if packet not in _INDEXING:
        return False
    is_by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None)
    is_fill = packet is not aten.index and args[2].numel() == 1  # Becomes a masked_fill_.
    return is_by_mask and not is_fill
