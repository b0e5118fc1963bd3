"""All messages of an exchange are encoded together: neither operators nor messages' bytes depend on how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Generator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlap import BFloat16, Float8, Float16, Int4, Int8, TopK, Wire
from overlap._torch.device import streams_replaced
from overlap.hooks import quantize
from overlap.hooks.wires import QuantizedSum, exchange
from overlap.hooks.wires.formats import Affine8

from ..one_stream import OneStream

NEAREST: list[Wire] = [Float16(), BFloat16(), Float8(chunk=128), Int8(), Int4(), TopK(0.01), TopK(0.3, chunk=256)]
STOCHASTIC: list[Wire] = [dataclasses.replace(wire, rounding="stochastic") for wire in NEAREST]
WIRES = pytest.mark.parametrize("wire", [*NEAREST, *STOCHASTIC, Affine8()], ids=repr)
DEVICE = pytest.mark.parametrize("has_streams", [False, True], ids=["cpu", "streams"])


class Operators(TorchDispatchMode):
    """Counts operators, but for views, which compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [returned.alias_info for returned in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Counted:
    """An awaitable that counts the operators of `coroutine`, and not those of others between its steps."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], into: Operators) -> None:
        self._coroutine = coroutine
        self._into = into

    def __await__(self) -> Generator[Any, Any, Any]:
        value = None
        while True:
            try:
                with self._into:
                    operation = self._coroutine.send(value)
            except StopIteration as stop:
                return stop.value
            value = yield operation


def _on(has_streams: bool) -> Any:
    return streams_replaced(OneStream(has_streams=has_streams))


class Loopback:
    """A collective in which every other rank sends what this one sends."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = list(pairs)

    def __await__(self) -> Generator[Any, Any, Any]:
        yield lambda: [received.copy_(sent) for received, sent in self._pairs]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, Any]], int]:
    """Counts the operators of a stage, whose collectives are those of this rank alone."""

    def all_to_all(outputs: Any, inputs: Any, *, group: Any) -> Loopback:
        return Loopback(zip(outputs, inputs, strict=True))

    def all_gather(output: torch.Tensor, input: torch.Tensor, *, group: Any) -> Loopback:
        return Loopback((part, input) for part in output.view(group.size(), -1))

    for module in (exchange, quantize):
        monkeypatch.setattr(module, "all_gather", all_gather)
    monkeypatch.setattr(exchange, "all_to_all", all_to_all)

    def count(coroutine: Coroutine[Any, Any, Any]) -> int:
        operators = Operators()
        for collective in Counted(coroutine, operators).__await__():
            collective()
        return len(operators.names)

    return count


def _group(size: int, rank: int = 1) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def _generator(wire: Wire) -> torch.Generator | None:
    return torch.Generator().manual_seed(0) if wire.is_stochastic else None


# Operators ---------------------------------------------------------------------------------------------------


@WIRES
@DEVICE
@pytest.mark.parametrize("leaves_errors", [False, True])
def test_the_operators_of_a_sum_do_not_depend_on_the_number_of_ranks(
    wire: Wire, has_streams: bool, leaves_errors: bool, alone: Any
) -> None:
    # As many parts as ranks without padding, and some with it. On a CPU less than what stays in the cache.
    for numel in (8 * 4096, 8 * 4096 + 40):
        counts = {}
        for size in (3, 4, 8):
            values = torch.randn(numel)
            out = torch.empty(numel) if leaves_errors else values
            with _on(has_streams):
                sum_over = QuantizedSum(numel, wire=wire, generator=_generator(wire), group=_group(size))
                counts[size] = alone(sum_over(values, out=out))
        assert counts[8] <= counts[4] <= max(counts[3], counts[4]), counts


# Bytes -------------------------------------------------------------------------------------------------------


@WIRES
@DEVICE
def test_rows_are_encoded_and_decoded_as_one_by_one(wire: Wire, has_streams: bool) -> None:
    for numel, count in ((5, 7), (4099, 5), (70_001, 9), (300_001, 3)):
        codec = wire.codec(numel)
        values = torch.randn(count, codec.numel)
        expected, messages = (torch.zeros(count, codec.message_bytes, dtype=torch.uint8) for _ in range(2))
        generator, other_generator = _generator(wire), _generator(wire)
        for row, message in zip(values, expected, strict=True):
            codec.encode(row, message, generator)
        before = values.clone()
        with _on(has_streams):
            codec.encode_rows(values, messages, other_generator)
        assert torch.equal(values, before)
        if not wire.is_stochastic or not isinstance(wire, Float16 | BFloat16 | TopK) or not has_streams:
            assert torch.equal(messages, expected), numel
        decoded, one = torch.empty_like(values), torch.empty(codec.numel)
        with _on(has_streams):
            codec.decode_rows(expected, decoded)
        for message, row in zip(expected, decoded, strict=True):
            codec.decode(message, one)
            assert torch.equal(row, one)
