"""Every loop of the corpus does with every form of update what it declares: exact, unless it says otherwise."""

from __future__ import annotations

import functools

import pytest

from .compare import Cell, Outcome, is_as_expected, outcomes
from .corpus import LOOPS, load

load()


@functools.cache
def _of_topic(topic: str) -> dict[Cell, Outcome]:
    """All loops of a topic, in one world of ranks."""
    return outcomes(name for name, loop in LOOPS.items() if loop.topic == topic)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_does_with_every_form_what_it_declares(name: str) -> None:
    loop = LOOPS[name]
    found = {form: outcome for (loop_name, form), outcome in _of_topic(loop.topic).items() if loop_name == name}
    faults = [
        f"{form}: {outcome}\n    declared: {loop.expected.get(form, 'exact')}\n{outcome.details}"
        for form, outcome in found.items()
        if not is_as_expected(outcome, loop.expected.get(form))
    ]
    assert not faults, "\n".join([f"{name}:", *faults])
