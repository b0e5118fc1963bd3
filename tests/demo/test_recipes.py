"""Every option trains what it says; exact ones end up equal to plain DDP in every bit."""

from __future__ import annotations

import pytest
import torch

from harness import run_ranks
from overlap.demo.experiment import train_and_compare
from overlap.demo.report import Report
from overlap.demo.settings import Settings
from overlap.errors import ConfigurationError
from overlap.launch import World

SMALL = {"images": 32, "epochs": 1, "batch_size": 8, "image_size": 16}
# By name: the options, and what is registered for them.
EXACT = {
    "uneven": (Settings(uneven=True, **SMALL | {"epochs": 2}), "chain(AllReduce(), Step(SGD, interleaved))"),
    "uneven zero": (Settings(uneven=True, zero=True, **SMALL), "chain(ZeroStep(SGD, interleaved))"),
    "zero adamw": (Settings(zero=True, optimizer="adamw", **SMALL), "chain(ZeroStep(AdamW, interleaved))"),
}
ROUNDED = {
    "bf16 adamw": (
        Settings(bf16_gradients=True, optimizer="adamw", **SMALL),
        "chain(Cast(bfloat16, AllReduce()), Step(AdamW, interleaved))",
    ),
    "powersgd zero": (
        Settings(powersgd=2, zero=True, **SMALL),
        "chain(PowerSGD(rank=2), ZeroStep(SGD, interleaved)), without momentum, learning rate 0.1",
    ),
    "quantize": (Settings(wire="int8", **SMALL), "chain(Quantize(Int8()), Step(SGD, interleaved))"),
}
AVERAGED = {
    "uneven local sgd": (
        Settings(uneven=True, local_sgd=2, **SMALL | {"epochs": 2}),
        "LocalSGD(SGD, period 2 from step 2)",
    ),
    "local sgd": (Settings(local_sgd=2, **SMALL | {"epochs": 2}), "LocalSGD(SGD, period 2 from step 2)"),
}


def _train(rank: int, world_size: int, asked: dict[str, Settings]) -> dict[str, Report]:
    world = World(rank=rank, size=world_size, device=torch.device("cpu"), backend="gloo")
    return {name: train_and_compare(settings, world) for name, settings in asked.items()}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """What rank 0 reports of every recipe, by name."""
    asked = {name: settings for name, (settings, _) in (EXACT | ROUNDED | AVERAGED).items()}
    return run_ranks(_train, 2, asked, timeout_s=150)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", EXACT | ROUNDED | AVERAGED)
def test_the_options_decide_what_is_registered(name: str, reports: dict[str, Report]) -> None:
    _, description = (EXACT | ROUNDED | AVERAGED)[name]
    assert reports[name].overlapped.description == description


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_recipe_ends_up_equal(name: str, reports: dict[str, Report]) -> None:
    report = reports[name]
    assert report.must_be_equal and report.passed and report.parity.largest == 0
    assert report.plain.losses == report.overlapped.losses


@pytest.mark.parametrize("name", ROUNDED | AVERAGED)
def test_a_recipe_that_is_not_exact_ends_up_close(name: str, reports: dict[str, Report]) -> None:
    assert not reports[name].must_be_equal
    assert 0 < reports[name].parity.parameters < 1


@pytest.mark.parametrize("name", ROUNDED)
def test_the_verdict_says_that_gradients_are_compressed(name: str, reports: dict[str, Report]) -> None:
    assert "these gradients are compressed" in reports[name].verdict()


def test_two_ways_to_send_gradients_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--bf16-gradients and --powersgd are ways"):
        Settings(bf16_gradients=True, powersgd=2)


def test_a_sharded_update_with_local_sgd_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--zero shares out"):
        Settings(zero=True, local_sgd=2)
