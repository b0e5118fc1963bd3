"""Each fault in how the library uses streams is found by a scenario."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import run_ranks
from harness.streams import STREAMS_BACKEND, one_process

from .mutants import MUTANTS
from .play import find, verdicts


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    with one_process(2):
        yield


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if not mutant.in_ranks])
def test_a_mutant_is_found(name: str) -> None:
    assert find(name) == MUTANTS[name].found_as


def test_mutants_of_two_ranks_are_found() -> None:
    names = [name for name, mutant in MUTANTS.items() if mutant.in_ranks]
    found = run_ranks(verdicts, 2, names, backend=STREAMS_BACKEND, timeout_s=120)
    assert {name: [one[name] for one in found if one[name]][:1] for name in names} == {
        name: [MUTANTS[name].found_as] for name in names
    }
