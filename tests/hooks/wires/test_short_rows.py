"""Rows that are shorter than what a message holds: as if zeros followed, and nothing is written behind their end."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from overlap import BFloat16, Float8, Int4, Int8, TopK, Wire
from overlap._torch.device import streams_replaced
from overlap.hooks.wires import Codec
from overlap.hooks.wires.numbers import Affine8

from ..one_stream import OneStream

NUMELS = [(1000, 1), (1000, 999), (1000, 490), (1000, 0), (70_001, 69_000), (600_001, 300_123)]


@pytest.mark.parametrize("has_streams", [False, True], ids=["cpu", "streams"])
@pytest.mark.parametrize("wire", [Int8(), Int4(), Float8(chunk=64), BFloat16(), TopK(0.1), Affine8()], ids=repr)
def test_they_are_encoded_decoded_and_added_as_whole_ones(wire: Wire, has_streams: bool) -> None:
    with streams_replaced(OneStream(has_streams=has_streams)):
        for numel, given in NUMELS:
            _as_whole(wire.codec(numel), given)


def _as_whole(codec: Codec, given: int) -> None:
    space = torch.randn(2, codec.numel)
    rows = space[:, :given]
    whole = pad(rows, (0, codec.numel - given))
    behind = space[:, given:].clone()
    expected, messages = (torch.zeros(2, codec.message_bytes, dtype=torch.uint8) for _ in range(2))
    codec.encode_rows(whole, expected)
    codec.encode_rows(rows, messages)
    assert torch.equal(messages, expected)
    left, left_of_whole = rows.clone(), whole.clone()
    codec.subtract_rows(left_of_whole, expected)
    codec.subtract_rows(left, messages)
    assert torch.equal(messages, expected) and torch.equal(left, left_of_whole[:, :given])
    out, out_of_whole = torch.full((2, given), 7.0), torch.full((2, codec.numel), 7.0)
    codec.decode_rows(messages, out)
    codec.decode_rows(messages, out_of_whole)
    assert torch.equal(out, out_of_whole[:, :given])
    total, total_of_whole = rows[0].clone(), whole[0].clone()
    codec.add_rows(messages, total)
    codec.add_rows(messages, total_of_whole)
    assert torch.equal(total, total_of_whole[:given])
    codec.decode_rows(messages, rows)
    assert torch.equal(space[:, given:], behind), "what is behind the rows"


@pytest.mark.parametrize("wire", [Int8(rounding="stochastic"), Int4(rounding="stochastic")], ids=repr)
def test_they_take_the_random_numbers_of_whole_ones(wire: Wire) -> None:
    for numel, given in NUMELS:
        codec = wire.codec(numel)
        rows = torch.randn(1, given)
        first, second = (torch.Generator().manual_seed(1) for _ in range(2))
        expected, messages = (torch.zeros(1, codec.message_bytes, dtype=torch.uint8) for _ in range(2))
        codec.encode_rows(pad(rows, (0, codec.numel - given)), expected, first)
        codec.encode_rows(rows, messages, second)
        assert torch.equal(messages, expected) and torch.equal(first.get_state(), second.get_state())
