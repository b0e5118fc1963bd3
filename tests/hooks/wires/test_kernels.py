"""Triton's kernels beside PyTorch's operators, bit for bit, and what becomes of them where they cannot be used.

Those that run the kernels need a GPU, or Triton's interpreter, which runs them on the CPU::

    pip install triton    # 190 MB to download, 690 MB on the disk: no part of what the tests install
    TRITON_INTERPRET=1 python -m pytest tests/hooks/wires/test_kernels.py
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import run_ranks
from overlap import Float8, Int4, Int8, Quantize, Wire
from overlap.hooks.wires import kernels
from overlap.hooks.wires.chunks import ChunkCodec

from ..quantize.given import given, of_ranks, reduced

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS_KERNELS = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE.type == "cuda") == IS_INTERPRETED,
    reason="needs Triton, and a GPU or else TRITON_INTERPRET=1",
)
# NumPy, which interprets, warns of divisions by zero.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NEAREST = [Int8(), Int4(), Float8(), Int8(chunk=64), Int4(chunk=2048), Float8(chunk=8), Int8(chunk=8192)]
WIRES: list[Wire] = [*NEAREST, *(dataclasses.replace(wire, rounding="stochastic") for wire in NEAREST)]
NUMELS = [1, 9, 513, 4097]


def _values(numel: int) -> torch.Tensor:
    """A row of values of each kind."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    place = torch.arange(numel)
    largest = torch.full((numel,), torch.finfo(torch.float32).max)
    kinds = [
        normal,
        torch.zeros(numel),
        torch.full((numel,), -0.0),
        normal * torch.logspace(-44, 37, numel),  # Every exponent.
        normal * 1e-40,  # Denormal numbers.
        largest.copysign(normal),
        torch.randint(-254, 255, (numel,), generator=generator) / 2,  # Halfway between integers.
        place.remainder(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0),
        torch.where(place % 100 == 3, 1e30, normal),
    ]
    return torch.stack(kinds)


def _padded(values: torch.Tensor, codec: ChunkCodec) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, codec.numel - values.size(1)))


def _encoded(
    codec: ChunkCodec, values: torch.Tensor, wire: Wire, form: kernels.Form, *, subtracts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator(values.device).manual_seed(1) if wire.is_stochastic else None
    messages = torch.zeros(len(values), codec.message_bytes, dtype=torch.uint8, device=values.device)
    values = values.clone()
    with kernels.in_form(form):
        (codec.subtract_rows if subtracts else codec.encode_rows)(values, messages, generator)
    return messages, values, None if generator is None else generator.get_state()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@RUNS_KERNELS
@QUIET
@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_messages_values_and_sums_are_the_operators_bit_for_bit(wire: Wire) -> None:
    for numel in NUMELS:
        codec: Any = wire.codec(numel)
        padded = _padded(_values(numel).to(DEVICE), codec)
        for subtracts in (False, True):
            expected = _encoded(codec, padded, wire, "plain", subtracts=subtracts)
            got = _encoded(codec, padded, wire, "triton", subtracts=subtracts)
            assert torch.equal(got[0], expected[0]), f"{numel}: messages"
            assert torch.equal(_bits(got[1]), _bits(expected[1])), f"{numel}: values, {subtracts=}"
            assert not wire.is_stochastic or torch.equal(got[2], expected[2]), "random numbers drawn"
        _same_decoded(codec, expected[0], padded, f"{numel}")


def _same_decoded(codec: ChunkCodec, messages: torch.Tensor, like: torch.Tensor, at: str) -> None:
    results = []
    for form in ("plain", "triton"):
        with kernels.in_form(form):
            codec.decode_rows(messages, out := torch.full_like(like, 7.0))
            codec.decode(messages[0], one := torch.full_like(like[0], 7.0))
        total = like[0].clone()
        if form == "triton":
            with kernels.in_form(form):
                codec.add_rows(messages, total)
        else:
            for message in messages:
                codec.decode(message, total, torch.Tensor.add_)
        results.append((out, total, one))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(_bits(plain), _bits(ours)), f"decoded, {at}"


@RUNS_KERNELS
@QUIET
@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_what_is_not_finite_marks_its_chunk_and_no_other(wire: Wire) -> None:
    codec: Any = wire.codec(5000)
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.randn(2, codec.numel, device=DEVICE)
        at = 0 if codec.chunks == 1 else 1
        values[1, at * codec.chunk_numel + 3] = bad
        messages, left, _ = _encoded(codec, values, wire, "triton", subtracts=True)
        _, expected_left, _ = _encoded(codec, values, wire, "plain", subtracts=True)
        chunks = torch.zeros(2, codec.chunks, dtype=torch.bool, device=DEVICE)
        chunks[1, at] = True
        with kernels.in_form("triton"):
            codec.decode_rows(messages, out := torch.empty_like(values))
        by_chunk = out.view(2, codec.chunks, codec.chunk_numel).isfinite()
        assert not by_chunk[chunks].any() and by_chunk[~chunks].all(), bad
        finite = expected_left.isfinite()
        assert torch.equal(left.isfinite(), finite) and torch.equal(left[finite], expected_left[finite])


@RUNS_KERNELS
@QUIET
def test_other_dtypes_strided_values_and_very_long_chunks_are_left_to_operators() -> None:
    codec: Any = Int8().codec(1000)
    with kernels.in_form("triton"):
        assert kernels.kernels_for(codec, torch.empty(1, 1000, device=DEVICE)) is not None
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            assert kernels.kernels_for(codec, torch.empty(1, 1000, dtype=dtype, device=DEVICE)) is None
        assert kernels.kernels_for(codec, torch.empty(1, 2000, device=DEVICE)[:, ::2]) is None
        long: Any = Int8(chunk=2**20).codec(2**20)
        assert kernels.kernels_for(long, torch.empty(1, 2**20, device=DEVICE)) is None


@RUNS_KERNELS
@QUIET
@pytest.mark.parametrize("wire", NEAREST[:3], ids=repr)
def test_before_they_are_used_they_are_found_to_be_right(wire: Wire) -> None:
    codec: Any = wire.codec(1000)
    kernels._are_right.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Triton's kernels")
        assert kernels.kernels_for(codec, torch.empty(1, 1000, device=DEVICE)) is not None


def _steps(rank: int, world_size: int, form: kernels.Form) -> list[Any]:
    warnings.simplefilter("ignore", RuntimeWarning)
    results = []
    with kernels.in_form(form):
        for wire in (Int8(), Int4(rounding="stochastic"), Float8(chunk=64)):
            stage = Quantize(wire, error_feedback=True)
            ddp = given([7, 1000, 4099], stage)
            results += [reduced(ddp, of_ranks(world_size, [7, 1000, 4099], step)[rank]) for step in range(2)]
            results.append(list(stage.state_dict()["error"].values()))
    return results


@RUNS_KERNELS
@pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_training_with_them_is_training_without_bit_for_bit() -> None:
    plain, triton = (run_ranks(_steps, 3, form) for form in ("plain", "triton"))
    for expected, got in zip(plain, triton, strict=True):
        assert len(expected) == 9
        assert all(torch.equal(*pair) for pairs in zip(expected, got, strict=True) for pair in zip(*pairs, strict=True))


# Without them ------------------------------------------------------------------------------------------------


class _Fake:
    """Kernels that use the operators, and then do as they are told."""

    spoils: Callable[[torch.Tensor], Any] = staticmethod(lambda messages: None)
    calls = 0

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    @staticmethod
    def can_encode(codec: ChunkCodec) -> bool:
        return True

    def encode(self, values: Any, messages: Any, generator: Any, *, subtracts: bool) -> None:
        type(self).calls += 1
        with kernels.in_form("plain"):
            (self._codec.subtract_rows if subtracts else self._codec.encode_rows)(values, messages, generator)
        self.spoils(messages)

    def decode(self, messages: Any, out: Any) -> None:
        with kernels.in_form("plain"):
            self._codec.decode_rows(messages, out)

    def add(self, messages: Any, total: Any) -> None:
        with kernels.in_form("plain"):
            self._codec.add_rows(messages, total)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[_Fake]:
    class Fake(_Fake):
        pass

    module = types.ModuleType("overlap.hooks.wires.triton_kernels")
    module.TritonKernels = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "_is_for_triton", lambda device: True)
    kernels._are_right.cache_clear()
    yield Fake
    kernels._are_right.cache_clear()


def _encode(wire: Wire) -> torch.Tensor:
    codec = wire.codec(1000)
    message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
    codec.encode(torch.linspace(-1, 1, codec.numel), message)
    return message


def test_kernels_that_are_right_are_used_and_looked_at_once(fake: type[_Fake]) -> None:
    with kernels.in_form("plain"):
        expected = _encode(Int4())
    assert fake.calls == 0
    for _ in range(2):
        assert torch.equal(_encode(Int4()), expected)
    assert fake.calls == 2 + 2, "once for each rounding of the comparison, and once for each message"


def _flip(messages: torch.Tensor) -> None:
    messages[-1, 300] ^= 1


def _fail(messages: torch.Tensor) -> None:
    raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("spoils", "why"), [(_flip, "a message is not that of PyTorch's operators"), (_fail, "no C compiler")]
)
def test_kernels_that_are_wrong_or_do_not_compile_are_not_used(fake: type[_Fake], spoils: Any, why: str) -> None:
    with kernels.in_form("plain"):
        expected = _encode(Int8())
    fake.spoils = staticmethod(spoils)
    with pytest.warns(RuntimeWarning, match=f"kernels for wires are not used on cpu: .*{why}"):
        assert torch.equal(_encode(Int8()), expected)
    assert torch.equal(_encode(Int8()), expected)
    assert fake.calls == 1
    with kernels.in_form("triton"):
        if spoils is _fail:
            with pytest.raises(RuntimeError, match="no C compiler"):
                _encode(Int8())
        else:
            assert fake.calls == 1


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter takes tensors of the CPU")
def test_on_a_cpu_operators_are_used() -> None:
    codec: Any = Int8().codec(1000)
    assert kernels.kernels_for(codec, torch.empty(1, 1000)) is None


def test_nothing_of_them_is_imported_with_the_library() -> None:
    code = "import overlap, sys; assert 'overlap.hooks.wires.triton_kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
