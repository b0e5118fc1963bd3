"""From curves to times: who reaches a target when, and what "never" does to medians and ratios."""

from __future__ import annotations

import math

import pytest

from overlap.race.standings import Standing, standings, time_to_target_s
from overlap.race.task import METRICS
from race.cells import cell, failed

ACCURACY, LOSS = METRICS["digits"], METRICS["text"]


def of(cells, target: float = 0.9, metric=ACCURACY) -> dict[str, Standing]:
    names = ("ddp", "torch-fp16", "overlap-int4")
    found = standings(cells, names, metric, target, evaluate_every=8, steps=20)
    return {one.contestant: one for one in found}


@pytest.mark.parametrize(
    ("metric", "values", "target", "time_s"),
    [
        (ACCURACY, [0.1, 0.5, 0.9, 0.8], 0.9, 4.0),
        (ACCURACY, [0.1, 0.5, 0.89, 0.8], 0.9, math.inf),
        (ACCURACY, [0.1, None, math.nan, 0.95], 0.9, 6.0),
        (LOSS, [5.0, 3.0, 2.4, 2.5], 2.4, 4.0),
        (LOSS, [5.0, None, None, None], 2.4, math.inf),
    ],
)
def test_the_time_is_that_of_the_first_evaluation_that_is_good_enough(metric, values, target, time_s) -> None:
    assert time_to_target_s(cell("ddp", 0, values, step_s=2.0), metric, target) == time_s


def test_ratios_are_taken_seed_by_seed() -> None:
    """The machine was three times as slow in the third seed: ratios say nothing of that, though medians do."""
    cells = [cell("ddp", seed, [0, 0.95], step_s=step_s) for seed, step_s in enumerate((10, 11, 30))]
    cells += [cell("overlap-int4", seed, [0, 0.95], step_s=step_s) for seed, step_s in enumerate((5, 5.5, 15))]
    found = of(cells)
    assert found["overlap-int4"].ratio == 0.5
    assert found["overlap-int4"].times_s == (5, 5.5, 15)
    assert found["ddp"].ratio == 1


def test_a_seed_that_never_arrives_is_worse_than_any_that_does() -> None:
    cells = [cell("ddp", seed, [0, 0.95]) for seed in range(3)]
    cells += [cell("torch-fp16", seed, [0, 0.95 if seed else 0.5], step_s=2) for seed in range(3)]
    cells += [cell("overlap-int4", seed, [0, 0.5 if seed else 0.95], step_s=2) for seed in range(3)]
    found = of(cells)
    assert (found["torch-fp16"].reached, found["torch-fp16"].time_s, found["torch-fp16"].ratio) == (2, 2, 2)
    one_of_three = found["overlap-int4"]
    assert (one_of_three.reached, one_of_three.time_s, one_of_three.ratio) == (1, math.inf, None)
    assert one_of_three.steps == math.inf


def test_without_a_time_of_plain_ddp_there_is_no_ratio() -> None:
    fast = cell("overlap-int4", 0, [0, 0.95])
    assert of([cell("ddp", 0, [0, 0.5]), fast])["overlap-int4"].ratio is None
    assert of([fast])["overlap-int4"].ratio is None
    assert of([cell("ddp", 1, [0, 0.95]), fast])["overlap-int4"].ratio is None


def test_steps_are_those_of_the_evaluation_and_never_more_than_were_trained() -> None:
    found = of([cell("ddp", 0, [0, 0.95, 1, 1]), cell("torch-fp16", 0, [0, 0, 0, 0.95])])
    assert (found["ddp"].steps, found["torch-fp16"].steps) == (8, 20)


def test_what_failed_says_why_and_counts_for_nothing() -> None:
    cells = [cell("ddp", 0, [0, 0.95]), failed("torch-fp16", 0, "hangs: stopped"), failed("torch-fp16", 1, "other")]
    one = of(cells)["torch-fp16"]
    assert (one.failure, one.times_s, one.final, one.sent_bytes) == ("hangs: stopped", (), None, None)


def test_a_final_value_that_is_not_finite_is_the_worst() -> None:
    values = [[0, 0.9], [0, None], [0, 0.7]]
    assert of([cell("ddp", seed, one) for seed, one in enumerate(values)])["ddp"].final == 0.7
    assert of([cell("ddp", 0, [0, None])])["ddp"].final is None
    losses = [cell("ddp", seed, [5, one]) for seed, one in enumerate((None, 2.0, 3.0))]
    assert of(losses, 2.5, LOSS)["ddp"].final == 3.0
