"""Numbers as small integers with scales: how large errors are, and what is exact."""

from __future__ import annotations

import math

import pytest
import torch

from overlap import Int4, Int8
from overlap.hooks.wires.numbers import ChunkCodec, _rounded


def _codec(numel: int, bits: int, chunk: int) -> ChunkCodec:
    return {4: Int4, 8: Int8}[bits](chunk=chunk).codec(numel)


def _there_and_back(values: torch.Tensor, bits: int, *, chunk: int = 512, generator=None) -> torch.Tensor:
    codec = _codec(values.numel(), bits, chunk)
    padded = torch.zeros(codec.numel)
    padded[: values.numel()] = values
    message, out = torch.zeros(codec.message_bytes, dtype=torch.uint8), torch.full_like(padded, 7.0)
    before = padded.clone()
    codec.encode(padded, message, generator)
    assert torch.equal(padded, before) or padded.isnan().any(), "what is encoded stays as it is"
    codec.decode(message, out)
    return out[: values.numel()]


def _steps(values: torch.Tensor, bits: int, chunk: int = 512) -> torch.Tensor:
    """The step of each value's chunk."""
    codec = _codec(values.numel(), bits, chunk)
    padded = torch.zeros(codec.numel)
    padded[: values.numel()] = values
    peaks = padded.view(codec.chunks, -1).abs().amax(1, keepdim=True)
    return (peaks / codec.grid.top).expand(-1, codec.chunk_numel).flatten()[: values.numel()]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [1, 7, 8, 511, 512, 513, 1025, 300_001])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_values_are_off_by_half_a_step_of_their_chunk_at_most(bits: int, numel: int, scale: float) -> None:
    # Each chunk on a scale of its own, so that another chunk's step would be far too large or small.
    values = torch.randn(numel) * scale * torch.logspace(-3, 3, numel)
    error = (_there_and_back(values, bits) - values).abs()
    assert (error <= _steps(values, bits) * 0.5001).all()
    if numel > 512:
        assert error.max() > 0


EXACT = {
    "zeros": lambda top: torch.zeros(700),
    "0.1": lambda top: torch.full((700,), 0.1),
    "-1/3": lambda top: torch.full((700,), -1 / 3),
    "1e-30": lambda top: torch.full((700,), 1e-30),
    "whole steps": lambda top: torch.arange(-top, top + 1.0),
    "whole steps of 2**-40": lambda top: torch.arange(-top, top + 1.0) * 2.0**-40,
    "zero between the peaks": lambda top: torch.tensor([-5.0, 0.0, 5.0]),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("what", EXACT)
def test_constants_and_whole_steps_are_exact_however_they_are_rounded(bits: int, what: str) -> None:
    exact = EXACT[what](2 ** (bits - 1) - 1)
    assert torch.equal(_there_and_back(exact, bits), exact)
    assert torch.equal(_there_and_back(exact, bits, generator=torch.Generator().manual_seed(0)), exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("constant", [torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1.99, 0.12345])
def test_a_constant_of_which_no_step_is_a_whole_part_is_off_by_the_last_place(bits: int, constant: float) -> None:
    # Where no step times ``top`` is the peak, the next number below is as close as it gets, and never infinity.
    values = torch.full((700,), constant)
    assert torch.allclose(_there_and_back(values, bits), values, rtol=2.0**-23, atol=0.0)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_again_changes_nothing(bits: int) -> None:
    once = _there_and_back(torch.randn(5000), bits)
    assert torch.equal(_there_and_back(once, bits), once)


@pytest.mark.parametrize("bits", [4, 8])
def test_denormal_numbers_are_lost_and_not_blown_up(bits: int) -> None:
    tiny = torch.full((9,), 1e-42)
    assert (_there_and_back(tiny, bits).abs() <= tiny).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_marks_its_chunk_and_no_other(bits: int, what: float) -> None:
    values = torch.randn(512 * 3)
    values[600] = what
    out = _there_and_back(values, bits)
    assert not out[512:1024].isfinite().any()
    assert out[:512].isfinite().all() and out[1024:].isfinite().all()


def test_stochastic_rounding_never_leaves_the_range() -> None:
    top = torch.full((2_000_000,), 127.0)
    assert torch.equal(_rounded(top.clone(), 127, torch.Generator().manual_seed(0)), top)
