"""The library on simulated streams: no scenario has a race, and each fault put in is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.streams import Detector, detecting, one_process
from overlap import declare
from overlap._torch.device import on_stream
from overlap.optim import subset

from .model import CPU
from .mutants import MUTANTS
from .play import Outcome, find, found_in_ranks, played
from .scenarios import SCENARIOS, OnDefault


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return played()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_no_race_and_the_values_are_right(name: str, outcomes: dict[str, Outcome]) -> None:
    assert not outcomes[name].error, outcomes[name].error
    assert outcomes[name].operators > 100


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    with one_process(2):
        yield


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if not mutant.in_ranks])
def test_a_mutant_is_found(name: str) -> None:
    assert find(name) == MUTANTS[name].found_as


def test_mutants_of_two_ranks_are_found() -> None:
    found = found_in_ranks()
    assert found == {name: MUTANTS[name].found_as for name in found} and found


# The stream that an optimizer is stepped on. -------------------------------------------------------------------


@pytest.fixture
def detector() -> Iterator[Detector]:
    with detecting() as detector:
        yield detector


def _stream_of(optimizer: torch.optim.Optimizer, detector: Detector) -> str:
    side = detector.new_stream("side")
    with on_stream(side), subset.ordered_after_gradients(optimizer, [torch.zeros(1, device=CPU)]):
        return detector.current_stream.name


def test_known_and_declared_optimizers_are_stepped_on_the_side_stream_and_others_on_the_default(
    detector: Detector,
) -> None:
    class Derived(torch.optim.AdamW):
        pass

    class Overrides(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Mine(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    class DerivedOnDefault(OnDefault):
        pass

    matrix = torch.nn.Parameter(torch.zeros(3, 3))
    replaced = torch.optim.SGD([matrix], lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign, assignment]
    others = [replaced, *(cls([matrix]) for cls in (Overrides, Mine, OnDefault, declare(DerivedOnDefault, "element")))]
    assert {_stream_of(one, detector) for one in others} == {"the default stream"}
    declare(Mine, "parameter")
    known = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, Derived, Mine)
    assert {_stream_of(cls([matrix]), detector) for cls in known} == {"side"}


def test_the_streams_wait_for_each_other_even_where_the_step_raises(detector: Detector) -> None:
    side, value = detector.new_stream("side"), torch.zeros(3, device=CPU)
    optimizer = OnDefault([torch.nn.Parameter(torch.zeros(3))])

    def step() -> None:
        with subset.ordered_after_gradients(optimizer, [value]):
            value.add_(1)
            raise RuntimeError("out of memory")

    side.wait_stream(detector.default_stream)
    with on_stream(side):
        value.add_(1)
        with pytest.raises(RuntimeError, match="out of memory"):
            step()
        value.add_(1)
    assert detector.current_stream.name == "the default stream"
    detector.report.check()
