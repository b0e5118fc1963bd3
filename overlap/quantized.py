"""Collectives of ``torch.distributed``, by their own signatures, whose tensors travel in fewer bits.

Sums are taken in fp32 of the values that were sent. A rank's own values take part unrounded, except in an all-to-all
and an all-gather, whose results are the same on every rank.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_number, described, told
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.collectives import Operation, all_gather, all_to_all
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.engine.wavefront import BackgroundTask, run_now
from overlap.hooks.wires import BFloat16, Float16, Int8, QuantizedSum, RoundingGenerator, Wire
from overlap.ranks.board import agree
from overlap.ranks.machines import levels_of

__all__ = ["DQuantType", "auto_quantize"]

_Made = tuple[Callable[[], Coroutine[Operation, Any, None]], list[Tensor]]
"""What exchanges the messages, and the tensors that it fills."""

# The calls that the ranks of a group have compared. Messages of another size than expected end the process inside of
# Gloo, so a call is compared the first time that it is made.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


class DQuantType(enum.Enum):
    """The type that :func:`overlap.auto_quantize` sends in place of a tensor's own dtype.

    >>> collective = auto_quantize(dist.all_gather_into_tensor, DQuantType.INT8)
    >>> DQuantType("fp16")
    <DQuantType.FP16: 'fp16'>
    """

    FP16 = "fp16"
    """:class:`overlap.Float16`: 11 bits of precision, up to 65,504."""
    BFP16 = "bfp16"
    """:class:`overlap.BFloat16`: 8 bits of precision, the range of fp32."""
    INT8 = "int8"
    """:class:`overlap.Int8`: integers of 8 bits with an fp32 scale for each 512 values."""

    def __str__(self) -> str:
        return self.value


_WIRES = {DQuantType.FP16: Float16(), DQuantType.BFP16: BFloat16(), DQuantType.INT8: Int8()}

_SPLITS = {"in_splits": "input_split_sizes", "out_splits": "output_split_sizes"}


def auto_quantize(
    collective: Callable[..., Any], qtype: DQuantType | Wire, quant_loss: float | None = None
) -> Callable[..., Any]:
    """``collective`` with its tensors sent as ``qtype``: the same arguments, results in the same tensors and dtypes.

    Values that ``qtype`` holds arrive unchanged. Sums are taken in fp32 of the values that were sent; an all-reduce
    sends its results quantized, too, and is equal in every bit on all ranks. Finite values that are too large for
    ``qtype`` are saturated, as by PyTorch's; a sum that is too large becomes infinite.

    Args:
        collective: ``all_gather``, ``all_gather_into_tensor``, ``all_to_all``, ``all_to_all_single``, ``all_reduce``,
            ``reduce_scatter`` or ``reduce_scatter_tensor`` of ``torch.distributed``. Tensors are of any shape and of
            floating-point dtypes; reductions are ``SUM`` and ``AVG``. ``all_to_all_single`` also takes the sizes as
            ``in_splits`` and ``out_splits``, as PyTorch's.
        qtype: a :class:`DQuantType`, or any :class:`Wire` such as ``Int4()``. Each process group that is used has
            random numbers of its own for stochastic rounding.
        quant_loss: results are divided by it.

    Returns:
        The function. When it returns, the results are there (on CUDA: the current stream waits for them); as
        PyTorch's, it refuses ``async_op=True``.

    Communication: sends and receives between ranks and all-gathers of bytes, as many as the plain collective would of
    ``qtype``, on ``group`` itself in the order of calls. An all-reduce in integers or 8-bit floats on several machines
    sums in fp32 within each, on groups that its first call makes (see :class:`~overlap.Quantize`). On CPU tensors ranks
    compare a call through the group's store the first time that they make it.

    Raises:
        ConfigurationError: an argument is none of those; a list does not have one tensor for each rank, or of another
            size.
        UnsupportedError: a tensor is not floating-point, another reduction, or ``async_op=True``.
        CollectiveError: ranks call different collectives, or with results of other sizes (on CPU tensors).

    >>> auto_quantize(torch.distributed.all_reduce, overlap.DQuantType.FP16).__name__
    'all_reduce'
    """
    name = getattr(collective, "__name__", told(collective))
    make = _known().get(collective) if isinstance(collective, Hashable) else None
    if make is None:
        names = sorted({known.__name__ for known in _known()})
        raise ConfigurationError(f"{name} cannot be quantized; these can, of torch.distributed: {', '.join(names)}")
    wire = qtype
    # PyTorch's own DQuantType has the same names.
    if isinstance(qtype, enum.Enum) and type(qtype).__name__ == "DQuantType" and qtype.name in DQuantType.__members__:
        wire = _WIRES[DQuantType[qtype.name]]
    if not isinstance(wire, Wire):
        raise ConfigurationError(
            f"qtype is {told(qtype)}: give one of {', '.join(f'DQuantType.{one.name}' for one in DQuantType)}, or a "
            "Wire such as Int4()"
        )
    loss = None if quant_loss is None else check_number("quant_loss", quant_loss)
    generators: weakref.WeakKeyDictionary[dist.ProcessGroup, RoundingGenerator] = weakref.WeakKeyDictionary()
    signature = inspect.signature(collective)

    @wraps(collective)
    def quantized(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **_as_named(kwargs, name))
        bound.apply_defaults()
        if bound.arguments.pop("async_op"):
            raise UnsupportedError(f"a quantized {name} is done when it returns: leave async_op out")
        group = bound.arguments.pop("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigurationError(f"{name}: this rank is not in the group, or there is no process group yet")
        rounding = generators.setdefault(group, RoundingGenerator(wire))
        exchange = _Exchange(group=group, wire=wire, rounding=rounding, loss=loss)
        op = bound.arguments.get("op")
        if op not in (None, dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(f"{op} cannot be quantized: give SUM or AVG")
        device = _device_of(bound.arguments.values())
        exchanges, outputs = make(exchange, *bound.arguments.values())
        # As all ranks must make it; sizes of an all-to-all are each rank's own.
        call = name if op is None else f"{'AVG' if op == dist.ReduceOp.AVG else 'SUM'} {name}"
        if not name.startswith("all_to_all"):
            call += f" with a result of {sum(output.numel() for output in outputs)} elements,"
        call += f" as {wire}"
        known = _compared.setdefault(group, set())
        if device.type == "cpu" and call not in known:
            agree(group, f"call a quantized {call}")
            known.add(call)
        run_now([BackgroundTask(index=0)], lambda item: exchanges(), executor_for(group, device))

    return quantized


def _as_named(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """The keyword arguments of the collective ``name``, of which PyTorch's ``auto_quantize`` shortens two."""
    if name != "all_to_all_single":
        return arguments
    named = {_SPLITS.get(key, key): value for key, value in arguments.items()}
    if len(named) != len(arguments):
        raise ConfigurationError(
            "all_to_all_single was given the same sizes under two names, such as in_splits: "
            "give input_split_sizes and output_split_sizes once each"
        )
    return named


@cache
def _known() -> dict[Any, Callable[..., _Made]]:
    by_name: dict[str, Callable[..., _Made]] = {
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "all_gather_single": _all_gather_into_tensor,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_tensor,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
    }
    # Renamed in torch 2.13: both names are taken if both are there.
    return {getattr(dist, name): make for name, make in by_name.items() if hasattr(dist, name)}


def _all_gather(exchange: _Exchange, tensor_list: Sequence[Tensor], tensor: Tensor) -> _Made:
    _check_list(exchange, "tensor_list", tensor_list, numel=tensor.numel())
    return partial(exchange.all_gather, tensor_list, tensor), list(tensor_list)


def _all_gather_into_tensor(exchange: _Exchange, output_tensor: Tensor, input_tensor: Tensor) -> _Made:
    ranks = exchange.group.size()
    _check_numel("output_tensor", output_tensor, ranks * input_tensor.numel())
    outputs = output_tensor.view(ranks, input_tensor.numel()).unbind()
    return partial(exchange.all_gather, outputs, input_tensor), [output_tensor]


def _all_to_all(
    exchange: _Exchange, output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor]
) -> _Made:
    _check_list(exchange, "output_tensor_list", output_tensor_list)
    _check_list(exchange, "input_tensor_list", input_tensor_list)
    return partial(exchange.all_to_all, output_tensor_list, input_tensor_list), list(output_tensor_list)


def _all_to_all_single(
    exchange: _Exchange,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> _Made:
    outputs = _split(exchange, "output", output, output_split_sizes)
    inputs = _split(exchange, "input", input, input_split_sizes)
    return partial(exchange.all_to_all, outputs, inputs), [output]


def _all_reduce(exchange: _Exchange, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> _Made:
    return partial(exchange.all_reduce, tensor, op), [tensor]


def _reduce_scatter(
    exchange: _Exchange, output: Tensor, input_list: Sequence[Tensor], op: Any = dist.ReduceOp.SUM
) -> _Made:
    _check_list(exchange, "input_list", input_list, numel=output.numel())
    return partial(exchange.reduce_scatter, output, input_list, op), [output]


def _reduce_scatter_tensor(exchange: _Exchange, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM) -> _Made:
    ranks = exchange.group.size()
    _check_numel("input", input, ranks * output.numel())
    return partial(exchange.reduce_scatter, output, input.reshape(ranks, output.numel()).unbind(), op), [output]


def _split(exchange: _Exchange, name: str, tensor: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    """By rank, along the first dimension."""
    ranks, rows = exchange.group.size(), tensor.size(0) if tensor.dim() else 0
    if not sizes:
        if not tensor.dim() or rows % ranks:
            raise ConfigurationError(
                f"{name} of shape {tuple(tensor.shape)} cannot be split evenly among {ranks} ranks: "
                f"give {name}_split_sizes"
            )
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ConfigurationError(
            f"{name}_split_sizes are {list(sizes)}: give one for each of {ranks} ranks, with a sum of {rows}"
        )
    parts: tuple[Tensor, ...] = tensor.split(list(sizes))
    return parts


def _device_of(arguments: Iterable[Any]) -> torch.device:
    """Raises: UnsupportedError: a tensor is not floating-point; ConfigurationError: they are on several devices."""
    lists = [value if isinstance(value, Sequence) else (value,) for value in arguments]
    tensors = [one for one in itertools.chain.from_iterable(lists) if isinstance(one, Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise UnsupportedError(f"{tensor.dtype} cannot be quantized: give floating-point tensors")
        if tensor.device != tensors[0].device:
            raise ConfigurationError(f"tensors lie on {tensors[0].device} and {tensor.device}: put them on one device")
    return tensors[0].device


def _check_list(exchange: _Exchange, name: str, tensors: Sequence[Tensor], *, numel: int | None = None) -> None:
    ranks = exchange.group.size()
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise ConfigurationError(f"{name} is a list of {ranks} tensors, one for each rank, got {described(tensors)}")
    if len(tensors) != ranks:
        raise ConfigurationError(f"{name} has {len(tensors)} tensors: give one for each of {ranks} ranks")
    for tensor in tensors if numel is not None else ():
        _check_numel(f"a tensor of {name}", tensor, numel)


def _check_numel(name: str, tensor: Tensor, numel: int | None) -> None:
    if tensor.numel() != numel:
        raise ConfigurationError(f"{name} has {tensor.numel()} elements, and needs {numel}")


# The exchange of messages


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """One call of a collective."""

    group: dist.ProcessGroup
    wire: Wire
    rounding: RoundingGenerator
    loss: float | None
    """Results are divided by it."""

    async def all_gather(self, outputs: Sequence[Tensor], input: Tensor) -> None:
        """Each rank's ``input`` into ``outputs``, by rank."""
        (message,) = self._messages([input])
        gathered = message.new_empty(self.group.size(), message.numel())
        await all_gather(gathered.view(-1), message, group=self.group)
        for row, output in zip(gathered, outputs, strict=True):
            self._read(row, output)

    async def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """``inputs[r]`` of this rank into ``outputs[this rank]`` of rank ``r``."""
        messages = self._messages(inputs)
        received = [messages[0].new_empty(self._message_bytes(output.numel())) for output in outputs]
        received[self.group.rank()] = messages[self.group.rank()]
        await all_to_all(received, messages, group=self.group)
        for message, output in zip(received, outputs, strict=True):
            self._read(message, output)

    async def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Any) -> None:
        """The sum or mean over ranks of their ``inputs[r]`` into ``output`` of rank ``r``."""
        if not output.numel():
            return
        rank, codec = self.group.rank(), self.wire.codec(output.numel())
        total = inputs[rank].detach().reshape(-1).to(torch.float32, copy=True)
        messages = self._messages(inputs)
        received = messages[rank].new_empty(self.group.size(), codec.message_bytes)
        await all_to_all(received.unbind(), messages, group=self.group)
        codec.add_rows(received[:rank], total)
        codec.add_rows(received[rank + 1 :], total)
        self._write(total, output, op)

    async def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """The sum or mean over ranks of ``tensor``, in place."""
        if not tensor.numel():
            return
        total = self._fitting(tensor.detach().reshape(-1)).to(torch.float32, copy=True)
        generator = self.rounding.of(self.group.rank(), tensor.device)
        # A sum over a machine may be too large for a wire that takes each rank's values.
        is_bounded = self.wire.largest < torch.finfo(torch.float32).max
        levels = None if is_bounded else levels_of(self.group, tensor.device)
        summed = QuantizedSum(total.numel(), wire=self.wire, generator=generator, group=self.group, levels=levels)
        await summed(total, out=total)
        self._write(total, tensor, op)

    def _messages(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A message for each tensor; if all have one length, by a fixed number of operators."""
        numels = {tensor.numel() for tensor in tensors}
        if len(numels) > 1:
            return [self._messages([tensor])[0] for tensor in tensors]
        (numel,) = numels
        device = tensors[0].device
        messages = torch.empty(len(tensors), self._message_bytes(numel), dtype=torch.uint8, device=device)
        if numel:
            rows = self._fitting(torch.stack([tensor.detach().reshape(-1) for tensor in tensors]))
            generator = self.rounding.of(self.group.rank(), device)
            self.wire.codec(numel).encode_rows(rows.float(), messages, generator)
        return list(messages)

    def _message_bytes(self, numel: int) -> int:
        return self.wire.codec(numel).message_bytes if numel else 0

    def _fitting(self, values: Tensor) -> Tensor:
        """``values`` without finite ones that the wire does not hold; infinities stay."""
        largest = self.wire.largest
        if largest >= torch.finfo(values.dtype).max:
            return values
        # Half precision does not hold the largest number of every wire.
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return torch.where(wide.isinf(), wide, wide.clamp(-largest, largest))

    def _read(self, message: Tensor, output: Tensor) -> None:
        if output.numel():
            values = torch.empty(1, output.numel(), dtype=torch.float32, device=output.device)
            self.wire.codec(output.numel()).decode_rows(message[None], values)
            self._write(values, output)

    def _write(self, values: Tensor, output: Tensor, op: Any = None) -> None:
        if op == dist.ReduceOp.AVG:
            values = values / self.group.size()
        if self.loss is not None:
            values = values / self.loss
        output.detach().copy_(values.view(output.shape))
