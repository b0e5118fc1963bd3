"""The library on simulated streams: no scenario has a race, and each fault put in is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.streams import one_process

from .mutants import MUTANTS
from .play import Outcome, find, found_in_ranks, played
from .scenarios import SCENARIOS


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
