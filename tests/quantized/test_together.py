"""Tensors of one length are encoded together: as they are one by one, in as many operators for eight as for three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlap import Float16, Int4, Int8, TopK, Wire
from overlap.quantized.formats import Format

WIRES = pytest.mark.parametrize("wire", [Int8(), Int4(rounding="stochastic"), Float16(), TopK(0.1)], ids=repr)


class _Operators(TorchDispatchMode):
    """Counts operators, but for views, which compute nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [returned.alias_info for returned in func._schema.returns]
        self.count += not any(alias is not None and not alias.is_write for alias in aliases)
        return func(*args, **(kwargs or {}))


def _generator(wire: Wire) -> torch.Generator | None:
    return torch.Generator().manual_seed(0) if wire.is_stochastic else None


def _operators(wire: Wire, tensors: Sequence[torch.Tensor]) -> int:
    with _Operators() as operators:
        Format(wire).encode(tensors, _generator(wire))
    return operators.count


@WIRES
def test_operators_do_not_depend_on_how_many_there_are(wire: Wire) -> None:
    counts = [_operators(wire, [torch.randn(1000) for _ in range(number)]) for number in (3, 8)]
    assert counts[0] == counts[1] > 0


@WIRES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_messages_are_those_of_each_alone(wire: Wire, dtype: torch.dtype) -> None:
    tensors = [torch.randn(numel).to(dtype) for numel in (1000, 1000, 0, 999, 1000, 1, 1)]
    messages, are_saturated = Format(wire).encode(tensors, _generator(wire))
    generator = _generator(wire)
    assert not are_saturated
    for tensor, message in zip(tensors, messages, strict=True):
        ((alone,), _) = Format(wire).encode([tensor], generator)
        assert message.shape == alone.shape
        if tensor.numel():
            expected, got = (Format(wire).read(one[None], tensor.numel()) for one in (alone, message))
            assert torch.equal(expected, got)


def test_what_is_too_large_is_found_among_those_that_are_not() -> None:
    tensors = [torch.ones(9), torch.tensor([1e6, float("inf")] + [1.0] * 7), torch.full((9,), float("nan"))]
    messages, are_saturated = Format(Float16()).encode(tensors)
    assert are_saturated
    found = Format(Float16()).read(torch.stack(messages), 9)
    assert found[1].tolist() == [65504.0, float("inf"), *[1.0] * 7] and found[2].isnan().all()
