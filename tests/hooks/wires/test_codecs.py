"""Every wire: how far off decoded values are, what is exact, what is not finite, and what a message holds."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import overlap
from benchmarks.host_cost import IdleStreams
from overlap import BFloat16, ConfigurationError, Float8, Float16, Int4, Int8, TopK, Wire
from overlap._torch.device import DeviceStreams, streams_replaced
from overlap.hooks.wires import Codec

WIRES = [Float16(), BFloat16(), Float8(), Float8(chunk=64), Int8(), Int8(chunk=2048), Int4(), TopK(0.01), TopK(0.3)]
EACH = pytest.mark.parametrize("wire", WIRES, ids=repr)
NUMELS = [1, 8, 9, 513, 70_001, 300_001]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _roundings(wire: Wire) -> list[Wire]:
    """``wire``, and where it is one of integers, the same rounding stochastically."""
    return [wire, dataclasses.replace(wire, rounding="stochastic")] if isinstance(wire, Int8 | Int4) else [wire]


def _padded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, codec.numel - values.numel()))


def _there_and_back(wire: Wire, values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    codec = wire.codec(values.numel())
    padded = _padded(codec, values)
    before = padded.clone()
    message, out = torch.full((codec.message_bytes,), 255, dtype=torch.uint8), torch.full_like(padded, 7.0)
    codec.encode_rows(padded[None], message[None], generator if wire.is_stochastic else None)
    assert torch.equal(padded.view(torch.int32), before.view(torch.int32)), "what is encoded stays as it is"
    codec.decode_rows(message[None], out[None])
    return out[: values.numel()]


def _chunks(wire: Wire, values: torch.Tensor) -> torch.Tensor:
    codec = wire.codec(values.numel())
    return _padded(codec, values).view(codec.chunks, codec.chunk_numel)


def _largest_error(wire: Wire, values: torch.Tensor) -> torch.Tensor:
    """What each wire's docstring says of each value, for rounding to nearest."""
    size = values.abs()
    if isinstance(wire, Float16):
        return (size * 2.0**-11).clamp(min=2.0**-25)
    if isinstance(wire, BFloat16):
        return size * 2.0**-8
    chunks = _chunks(wire, values).abs()
    if isinstance(wire, TopK):
        kept = max(1, round(wire.density * chunks.size(1)))
        smallest = chunks.sort(dim=1, descending=True).values[:, kept - 1 : kept]
        bound = torch.where(chunks >= smallest, chunks * 2.0**-8, chunks)
    elif isinstance(wire, Float8):
        bound = torch.maximum(chunks / 16, chunks.amax(1, keepdim=True) / 458_752)
    else:
        bound = (chunks.amax(1, keepdim=True) / {Int8: 127, Int4: 7}[type(wire)] / 2).expand_as(chunks)
    return bound.flatten()[: values.numel()]


@EACH
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_values_are_as_close_as_the_docstring_says(wire: Wire, scale: float) -> None:
    if isinstance(wire, Float16) and scale == 1e30:
        pytest.skip("float16 ends at 65,504")
    generator = torch.Generator().manual_seed(0)
    for numel in NUMELS:
        # From chunk to chunk the scale changes, so that another chunk's step would be far too large or small.
        values = torch.randn(numel) * scale * torch.logspace(-3, 3, numel)
        # And as close as fp32 itself is.
        bound = _largest_error(wire, values) * 1.0001 + torch.finfo(torch.float32).tiny / 2
        errors = [(_there_and_back(each, values, generator) - values).abs() for each in _roundings(wire)]
        for times, error in enumerate(errors, start=1):
            assert (error <= times * bound).all()
        if numel > 1000 and not (isinstance(wire, Float16) and scale == 1e-30):
            assert errors[0].max() > 0.5 * bound.min()


GRIDS = pytest.mark.parametrize(("wire", "top"), [(Int4(), 7), (Int8(), 127)], ids=str)


@GRIDS
def test_constants_and_whole_steps_are_exact_however_they_are_rounded(wire: Wire, top: int) -> None:
    steps = torch.arange(-top, top + 1.0)
    for exact in (*(torch.full((700,), value) for value in (0.1, -1 / 3, 1e-28)), steps, steps * 2.0**-40):
        for each in _roundings(wire):
            assert torch.equal(_there_and_back(each, exact, torch.Generator().manual_seed(0)), exact)


@GRIDS
def test_constants_are_off_by_the_last_place_at_most_and_denormal_ones_are_not_blown_up(wire: Wire, top: int) -> None:
    # In 8 bits fp32's largest number itself becomes infinite.
    largest = torch.finfo(torch.float32).max * (1 - 2.0**-23)
    for constant in (largest, -largest, 1.99, 0.12345):
        values = torch.full((700,), constant)
        assert torch.allclose(_there_and_back(wire, values), values, rtol=2.0**-23, atol=0.0)
    tiny = torch.full((9,), 1e-42)
    assert (_there_and_back(wire, tiny).abs() <= tiny).all()


@EACH
def test_a_value_that_is_not_finite_is_seen_in_its_chunk_and_no_other(wire: Wire) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096 * 3)
    at = 4096 + 77
    for values[at] in (math.nan, math.inf, -math.inf):
        for back in (_there_and_back(each, values, generator) for each in _roundings(wire)):
            assert not back[at].isfinite()
            assert back[:4096].isfinite().all() and back[8192:].isfinite().all()


@pytest.mark.parametrize("wire", [Float16(), BFloat16(), TopK(0.5)], ids=repr)
def test_values_above_the_largest_become_infinite(wire: Wire) -> None:
    largest = torch.finfo(torch.float16 if wire == Float16() else torch.bfloat16).max
    values = torch.tensor([largest, -largest, min(largest * 1.01, torch.finfo(torch.float32).max)])
    assert _there_and_back(wire, values[:1])[0] == largest
    assert _there_and_back(wire, values[2:])[0] == math.inf


DRAWS = 3000


@pytest.mark.parametrize("wire", [Int8(rounding="stochastic"), Int4(rounding="stochastic")], ids=repr)
def test_stochastic_rounding_has_no_bias_and_its_generator_is_not_the_global_one(wire: Wire) -> None:
    state = torch.get_rng_state()
    values = torch.rand(512, generator=torch.Generator().manual_seed(0)) * 2 - 1
    draws, again = (
        _there_and_back(wire, values.repeat(DRAWS), torch.Generator().manual_seed(3)).view(DRAWS, -1).double()
        for _ in range(2)
    )
    assert torch.equal(draws, again) and torch.equal(torch.get_rng_state(), state)
    # A value lies between two numbers with a variance of at most a quarter of their distance's square; five sigma of
    # the mean, where the distance is at most twice the largest error of rounding to nearest.
    bound = 5 * _largest_error(wire, values) / math.sqrt(DRAWS)
    assert ((draws.mean(0) - values).abs() <= bound).all()
    biased = (_there_and_back(type(wire)(), values) - values).abs() > bound
    assert biased.float().mean() > 0.4, "rounding to nearest would not pass this test"
    assert (draws.std(0) > 0).sum() > 400
    # Each value comes out as one of two neighbours.
    assert ((draws == draws.amin(0)) | (draws == draws.amax(0))).all()


@EACH
def test_rows_are_encoded_and_decoded_as_one_by_one_with_streams_and_without(wire: Wire) -> None:
    for made, (numel, count) in itertools.product(_roundings(wire), ((5, 7), (4099, 5), (300_001, 2))):
        codec = made.codec(numel)
        assert codec.numel >= numel and codec.message_bytes % 16 == 0
        values = torch.randn(count, codec.numel)
        one_by_one, messages = (torch.zeros(count, codec.message_bytes, dtype=torch.uint8) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for row, message in zip(values, one_by_one, strict=True):
            codec.encode_rows(row[None], message[None], generator if made.is_stochastic else None)
        for has_streams in (False, True):
            generator = torch.Generator().manual_seed(0)
            decoded, one = torch.empty_like(values), torch.empty(1, codec.numel)
            with streams_replaced(IdleStreams() if has_streams else DeviceStreams()):
                codec.encode_rows(values, messages, generator if made.is_stochastic else None)
                codec.decode_rows(one_by_one, decoded)
            assert torch.equal(messages, one_by_one), numel
            for message, row in zip(one_by_one, decoded, strict=True):
                codec.decode_rows(message[None], one)
                assert torch.equal(row, one[0])


@EACH
def test_nothing_is_an_empty_message(wire: Wire) -> None:
    codec = wire.codec(0)
    assert codec.numel == 0 and codec.message_bytes == 0
    # Where nothing begins need not be aligned.
    message = torch.empty(3, dtype=torch.uint8)[3:]
    codec.encode_rows(torch.empty(1, 0), message[None])
    codec.decode_rows(message[None], torch.empty(1, 0))
    codec.add_rows(message[None], torch.empty(0))


def test_bytes_on_the_page_are_those_of_the_codecs() -> None:
    page = (Path(overlap.__file__).parents[1] / "docs" / "wires.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\d\.\d{3}) \|", page, re.MULTILINE)
    assert {eval(typed, vars(overlap)).__class__ for typed, _ in rows} == {type(wire) for wire in WIRES}
    for typed, share in rows:
        numel = 4096 * 1000
        assert f"{eval(typed, vars(overlap)).codec(numel).message_bytes / (4 * numel):.3f}" == share, typed


@EACH
def test_a_wire_is_shown_as_it_would_be_typed(wire: Wire) -> None:
    for one in _roundings(wire):
        assert eval(repr(one), vars(overlap)) == one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(chunk=12), "chunk is 12: give a positive multiple of 8"),
        (lambda: Float8(chunk=64.0), r"chunk is 64\.0"),
        (lambda: Int4(rounding="up"), "rounding is 'up': give 'nearest' or 'stochastic'"),
        (lambda: TopK(1.5), r"density is 1\.5: give the part of the values to send"),
        (lambda: TopK(math.nan), "density is nan"),
        (lambda: TopK("1%"), "density is '1%'"),
        (lambda: TopK(0.1, chunk=65_536), "chunk is 65536: give at most 32768"),
    ],
)
def test_bad_options_are_named(make: Callable[[], Wire], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
