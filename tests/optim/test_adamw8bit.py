"""AdamW with moments in 8 bits: its map, what it computes, what it keeps, what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import assert_parity
from overlap import ConfigurationError, UnsupportedError
from overlap.optim import AdamW8bit
from overlap.optim.dynamic_map import DynamicMap

SIGNED, UNSIGNED = DynamicMap(is_signed=True), DynamicMap(is_signed=False)
MAPS = pytest.mark.parametrize("a_map", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])


def _encoded(a_map: DynamicMap, values: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = torch.empty(values.shape, dtype=torch.uint8), torch.empty(len(values))
    a_map.encode(values, codes, scales)
    return codes, scales


def test_the_maps_are_those_of_the_paper() -> None:
    signed, unsigned = SIGNED.numbers, UNSIGNED.numbers
    assert signed.unique().numel() == 255 and unsigned.unique().numel() == 256
    assert torch.equal(signed[:128], -signed[128:])
    assert bool((signed[:128].diff() > 0).all()) and bool((unsigned.diff() > 0).all())
    assert signed[0] == 0 and signed[127] == unsigned[255] == 1
    # Of seven bits 0001xxx: three zeros, so between 1e-4 and 1e-3 in 8 steps.
    assert signed[0b0001000:0b0010000].tolist() == pytest.approx([1e-3 * (0.1 + 0.9 * (j + 1) / 8) for j in range(8)])
    # And with one bit more: 16 steps.
    assert unsigned[0b00010000:0b00100000].diff().tolist() == pytest.approx([1e-3 * 0.9 / 16] * 15)
    assert signed[1] == pytest.approx(1e-6) and unsigned[0] == pytest.approx(0.55e-7)


@MAPS
def test_every_code_is_what_its_number_is_encoded_to(a_map: DynamicMap) -> None:
    numbers = a_map.numbers.float()[None]
    codes, scales = _encoded(a_map, numbers * 3)
    assert scales.tolist() == [3.0]
    found = a_map.decode(codes, scales)
    assert torch.equal(found, numbers * 3)


@MAPS
def test_a_number_becomes_the_nearest_one_but_for_its_rounding_to_11_bits(a_map: DynamicMap) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 256, generator=generator) * 10 ** -(torch.rand(64, 256, generator=generator) * 5)
    values = values if a_map.is_signed else values.abs()
    codes, scales = _encoded(a_map, values)
    assert torch.equal(scales, values.abs().amax(1))
    unit = (values / scales[:, None]).double()
    distances = (a_map.numbers.unique() - unit[..., None]).abs()
    nearest, found = distances.amin(-1), (a_map.decode(codes, scales) / scales[:, None] - unit).abs()
    # What rounding moves by half of its last place may cross the middle between two, and be as far on the other side.
    assert bool((found <= nearest + unit.abs() * 2**-10 + 1e-9).all())
    # The largest of a row is exact.
    where = values.abs().argmax(1, keepdim=True)
    assert torch.equal(a_map.decode(codes, scales).gather(1, where), values.gather(1, where))


@MAPS
def test_rows_of_zeros_of_tiny_and_of_no_numbers_stay_by_themselves(a_map: DynamicMap) -> None:
    values = torch.ones(6, 64)
    values[0], values[1], values[2] = 0.0, 1e-40, torch.linspace(0, 1e-37, 64)
    values[3, 5], values[4, 5] = float("nan"), float("inf")
    found = a_map.decode(*_encoded(a_map, values))
    assert torch.equal(found[0], values[0]) and torch.equal(found[5], values[5])
    assert bool(found[:3].isfinite().all()) and bool((found[:3] <= values[:3].amax(1, keepdim=True)).all())
    assert not bool(found[3:5, 5].isfinite().any())


def test_a_second_moment_is_never_rounded_to_zero_beside_larger_ones() -> None:
    values = torch.tensor([[1.0, 1e-9, 1e-30, 0.5]])
    assert bool((UNSIGNED.decode(*_encoded(UNSIGNED, values)) > 0).all())


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *, steps: int = 5, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1**step
        optimizer.step()


SHAPES = ((96, 86), (300,), (5, 7, 11), ())


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.3, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-4}, {"lr": torch.tensor(0.02)}],
    ids=["defaults", "all set", "a tensor for lr"],
)
def test_in_full_precision_it_is_adamw(options: dict[str, Any]) -> None:
    ours, theirs = _parameters(*SHAPES), _parameters(*SHAPES)
    optimizer = AdamW8bit(ours, **options, min_numel=10**6)
    # PyTorch computes with a tensor in fp32, and with a number in fp64.
    options = {**options, "lr": float(options.get("lr", 1e-3))}
    reference = torch.optim.AdamW(theirs, **options, foreach=False)
    _train(optimizer, ours)
    _train(reference, theirs)
    assert_parity(ours, theirs, what="parameters")
    for one, other in zip(ours, theirs, strict=True):
        assert_parity(dict(optimizer.state[one]), dict(reference.state[other]), what="state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_in_eight_bits_it_follows_adamw(dtype: torch.dtype) -> None:
    ours, theirs = _parameters((128, 64), dtype=dtype), _parameters((128, 64), dtype=torch.float64)
    before = theirs[0].detach().clone()
    optimizer, reference = AdamW8bit(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(128, 64, generator=generator) + torch.linspace(-2, 2, 64)
        ours[0].grad, theirs[0].grad = gradient.to(dtype), gradient.double()
        optimizer.step()
        reference.step()
    moved, expected = (ours[0].detach().double() - before, theirs[0].detach() - before)
    likeness = torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0)
    assert likeness > (0.99 if dtype == torch.bfloat16 else 0.998)  # bf16 rounds the parameters themselves.
    assert optimizer.state[ours[0]]["exp_avg"].dtype == torch.uint8


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def test_its_state_is_a_quarter_of_adamws() -> None:
    ours, theirs = _parameters((512, 512)), _parameters((512, 512))
    optimizer, reference = AdamW8bit(ours), torch.optim.AdamW(theirs)
    _train(optimizer, ours, steps=1)
    _train(reference, theirs, steps=1)
    assert _state_bytes(optimizer) / _state_bytes(reference) < 0.255


def test_blocks_are_by_themselves_so_that_parts_are_as_the_whole() -> None:
    (whole,) = _parameters((9000,))
    parts = [nn.Parameter(piece.clone()) for piece in whole.detach().split([4096, 4904])]
    one, two = AdamW8bit([whole]), AdamW8bit(parts)
    for step in range(5):
        gradient = torch.randn(9000, generator=torch.Generator().manual_seed(step))
        whole.grad = gradient
        for part, piece in zip(parts, gradient.split([4096, 4904]), strict=True):
            part.grad = piece.clone()
        one.step()
        two.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach())
    for key in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        assert torch.equal(torch.cat([two.state[part][key] for part in parts]), one.state[whole][key]), key


def test_the_memory_format_changes_nothing() -> None:
    shape = (32, 16, 3, 4)
    (one,), (other,) = _parameters(shape), _parameters(shape)
    other.data = other.data.to(memory_format=torch.channels_last)
    ours, theirs = AdamW8bit([one]), AdamW8bit([other])
    _train(ours, [one], steps=3)
    _train(theirs, [other], steps=3)
    other.grad = other.grad.to(memory_format=torch.channels_last)
    theirs.step()
    ours.step()
    assert other.stride() != one.stride() and torch.equal(one, other)
    assert_parity(dict(theirs.state[other]), dict(ours.state[one]), what="state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_loaded_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    parameters = _parameters(*SHAPES, dtype=dtype)
    optimizer = AdamW8bit(parameters, lr=0.01)
    _train(optimizer, parameters)
    resumed = copy.deepcopy(parameters)
    other = AdamW8bit(resumed, lr=0.5, block_numel=64)
    seen: list[str] = []
    other.register_load_state_dict_pre_hook(lambda o, s: seen.append("before"))
    other.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    other.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"]
    assert other.param_groups[0]["block_numel"] == 256
    for each, theirs in ((optimizer, parameters), (other, resumed)):
        _train(each, theirs, first=5)
    assert_parity(resumed, parameters, what="parameters")
    assert_parity(copy.deepcopy(other.state_dict()), optimizer.state_dict(), what="state")


def test_a_state_of_another_kind_is_refused() -> None:
    parameters, others = _parameters((96, 86)), _parameters((96, 86))
    optimizer, plain = AdamW8bit(parameters), torch.optim.AdamW(others, lr=0.3)
    optimizer.load_state_dict(plain.state_dict())  # Without any state: its options.
    assert optimizer.param_groups[0]["lr"] == 0.3 and optimizer.param_groups[0]["block_numel"] == 256
    _train(plain, others, steps=1)
    with pytest.raises(ConfigurationError, match=r"shape \(96, 86\) in group 0 is not AdamW8bit's .* are not encoded"):
        optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state
    with pytest.raises(ConfigurationError, match="not a state_dict of an optimizer"):
        optimizer.load_state_dict({})
    _train(optimizer, parameters, steps=1)
    for option, value, match in (
        ("block_numel", 128, "has 33 blocks, but with block_numel=128 and min_numel=4096 it has 65"),
        ("min_numel", 10_000, "has 33 blocks, but with block_numel=256 and min_numel=10000 it has 0"),
    ):
        before = parameters[0].detach().clone()
        was, optimizer.param_groups[0][option] = optimizer.param_groups[0][option], value
        with pytest.raises(ConfigurationError, match=match):
            _train(optimizer, parameters, steps=1)
        assert torch.equal(parameters[0], before)
        optimizer.param_groups[0][option] = was
        _train(optimizer, parameters, steps=1)
    small = AdamW8bit(_parameters((8, 8)))
    _train(small, small.param_groups[0]["params"], steps=1)
    small.param_groups[0]["min_numel"] = 0
    with pytest.raises(ConfigurationError, match="has 0 blocks, but with block_numel=256 and min_numel=0 it has 1"):
        _train(small, small.param_groups[0]["params"], steps=1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"amsgrad": True}, "no amsgrad=True"),
        ({"capturable": True}, "no capturable=True"),
        ({"fused": True}, "no fused=True"),
        ({"foreach": True}, "no foreach=True"),
        ({"differentiable": True}, "no differentiable=True"),
        ({"lr": -1.0}, "lr is a number of at least 0, got -1"),
        ({"eps": math.nan}, "eps is"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"block_numel": 100}, "block_numel is a multiple of 64, got 100"),
        ({"block_numel": 0}, "block_numel is a multiple of 64"),
        ({"min_numel": -1}, "min_numel is a number of elements"),
        ({"lr": torch.ones(2)}, "lr is a number, or a tensor of one"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        AdamW8bit(_parameters((4,)), **options)
    with pytest.raises(ConfigurationError, match=match):
        AdamW8bit([{"params": _parameters((4,)), **options}])


def test_complex_and_sparse_tensors_are_refused_and_empty_ones_skipped() -> None:
    with pytest.raises(UnsupportedError, match="real parameters"):
        AdamW8bit([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    empty, (full,) = nn.Parameter(torch.zeros(0, 4)), _parameters((4,))
    optimizer = AdamW8bit([empty, full])
    empty.grad, full.grad = torch.zeros(0, 4), torch.ones(4).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        optimizer.step()
    assert empty not in optimizer.state
