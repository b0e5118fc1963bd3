"""The library on simulated streams: no scenario has a race, and each fault put in is found."""

from collections.abc import Iterator

import pytest
import torch

from harness.streams import detecting, one_process
from overlap import AllReduce, Bucket

from .model import Deep, batch, wrapped
from .mutants import MUTANTS
from .play import Outcome, find, found_in_ranks, played
from .scenarios import SCENARIOS, step


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


@pytest.mark.usefixtures("_group")
def test_buckets_that_are_released_have_room_for_the_next_ones_while_the_host_runs_ahead() -> None:
    ddp, kept = wrapped(Deep, gradient_as_bucket_view=True), []
    batches = [batch(step, 0) for step in range(5)]
    with detecting() as detector:

        def note(bucket: Bucket) -> None:
            if bucket.step > 2 and bucket.index < 7:  # With the last of ten DDP needs all; then activations are gone.
                kept.append(detector.allocator.kept_bytes)

        (optimizer,) = step(AllReduce, lambda: note, release_gradients=True)(ddp)
        for tokens, target in batches:
            torch.nn.functional.mse_loss(ddp(tokens), target).backward()
            optimizer.step()
    bucket_bytes = 4 * sum(parameter.numel() for parameter in ddp.module.head.parameters())
    assert len(kept) == 14 and 0 < max(kept) <= 4 * bucket_bytes
