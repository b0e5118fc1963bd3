"""The model-based test itself: each fault put into the lifecycle on purpose must make it fail.

For every event and phase of the table there is a mutant, or a reason in ``UNOBSERVABLE`` why no loop can tell.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from lifecycle_calls import draw, parse
from lifecycle_driver import Player
from lifecycle_forms import FORMS

from harness import run_ranks
from overlap.optim.lifecycle import PassGradients, UpdateLifecycle
from overlap.optim.phases import TRANSITIONS, Event, Phase, Refusal

Patches = Callable[[], list[Any]]
_LIMIT = int(os.environ.get("OVERLAP_MUTANT_SEQUENCES", "60"))
"""So many sequences are tried at most, should the seed that is named no longer serve."""


@dataclass(frozen=True)
class Mutant:
    """A fault, the form that shows it, and what is known to find it: the seed of a sequence, or its calls."""

    form: str
    patches: Patches
    found_by: int | str = 0


def _entry(event: Event, phase: Phase, outcome: Phase | Refusal) -> Patches:
    return lambda: [mock.patch.dict(TRANSITIONS[event], {phase: outcome})]  # type: ignore[arg-type]


def _without(name: str) -> Patches:
    owner = UpdateLifecycle if hasattr(UpdateLifecycle, name) else PassGradients
    return lambda: [mock.patch.object(owner, name, return_value=None)]


_REFUSED = Refusal("a mutant refuses this", then=Phase.FAILED)

INTERLEAVED, DEFERRED, SUBSET, AUTOMATIC = "step_interleaved", "step_deferred", "step_subset", "step_automatic"
LOCAL, SHARDED, SHARDED_AUTOMATIC = "local_before_start", "zero_interleaved", "zero_automatic"

_FAILING_STEP = "forward backward failing_step step"

# The entries of the table: (event, phase): (form, what it leads to in the mutant, what finds it).
ENTRIES: dict[tuple[Event, Phase], tuple[str, Phase | Refusal, int | str]] = {
    (Event.FORWARD, Phase.IDLE): (DEFERRED, Phase.REDUCED, 7),
    (Event.FORWARD, Phase.REDUCED): (DEFERRED, Phase.IDLE, "forward backward forward step"),
    (Event.FORWARD, Phase.APPLIED): (INTERLEAVED, Phase.IDLE, 3),
    (Event.FORWARD, Phase.STEPPED): (INTERLEAVED, Phase.STEPPED, 36),
    (Event.FORWARD, Phase.FAILED): (INTERLEAVED, Phase.FAILED, 11),
    (Event.BACKWARD, Phase.IDLE): (INTERLEAVED, _REFUSED, 6),
    (Event.BACKWARD, Phase.REDUCED): (DEFERRED, _REFUSED, 0),
    (Event.BACKWARD, Phase.APPLIED): (INTERLEAVED, Phase.BACKWARD, "forward backward forward backward"),
    (Event.BACKWARD, Phase.STEPPED): (INTERLEAVED, _REFUSED, 9),
    (Event.BACKWARD, Phase.FAILED): (DEFERRED, Phase.BACKWARD, "forward backward forward failing_step backward"),
    (Event.STEP, Phase.IDLE): (DEFERRED, Phase.FAILED, "step step"),
    (Event.STEP, Phase.BACKWARD): (DEFERRED, Phase.BACKWARD, "incomplete_backward zero_grad:T step"),
    (Event.STEP, Phase.REDUCED): (DEFERRED, Phase.REDUCED, 0),
    (Event.STEP, Phase.APPLIED): (INTERLEAVED, Phase.APPLIED, 1),
    (Event.STEP, Phase.STEPPED): (INTERLEAVED, _REFUSED, "forward backward step ddp_zero_grad:T step"),
    (Event.STEP, Phase.FAILED): (INTERLEAVED, Phase.STEPPED, "forward failing_backward:first ddp_zero_grad:T step"),
    (Event.ZERO_GRAD, Phase.IDLE): (DEFERRED, Phase.FAILED, "zero_grad:T step"),
    (Event.ZERO_GRAD, Phase.BACKWARD): (DEFERRED, Phase.IDLE, "incomplete_backward zero_grad:T step"),
    (Event.ZERO_GRAD, Phase.REDUCED): (
        DEFERRED,
        Phase.REDUCED,
        "forward backward zero_grad:T own_gradient:1 step forward",
    ),
    (Event.ZERO_GRAD, Phase.APPLIED): (INTERLEAVED, Phase.IDLE, "forward backward zero_grad:T"),
    (Event.ZERO_GRAD, Phase.STEPPED): (INTERLEAVED, Phase.STEPPED, "forward backward step zero_grad:F step"),
    (Event.ZERO_GRAD, Phase.FAILED): (INTERLEAVED, Phase.FAILED, "forward failing_backward:first zero_grad:T step"),
    (Event.LOAD, Phase.IDLE): (DEFERRED, Phase.FAILED, "load step"),
    (Event.LOAD, Phase.BACKWARD): (DEFERRED, Phase.IDLE, "incomplete_backward zero_grad:T load step"),
    (Event.LOAD, Phase.REDUCED): (DEFERRED, Phase.IDLE, "forward backward load step forward"),
    (Event.LOAD, Phase.APPLIED): (INTERLEAVED, Phase.APPLIED, "forward backward load"),
    (Event.LOAD, Phase.STEPPED): (INTERLEAVED, Phase.IDLE, "forward backward step load forward"),
    (Event.LOAD, Phase.FAILED): (
        INTERLEAVED,
        Phase.IDLE,
        "forward failing_backward:first ddp_zero_grad:T load step",
    ),
    (Event.FAILURE, Phase.BACKWARD): (INTERLEAVED, Phase.IDLE, "forward failing_backward:first forward"),
    (Event.FAILURE, Phase.FAILED): (INTERLEAVED, Phase.IDLE, 5),
    (Event.UPDATE_FAILURE, Phase.IDLE): (DEFERRED, Phase.FAILED, "no_sync zero_grad:F failing_step step"),
    (Event.UPDATE_FAILURE, Phase.REDUCED): (DEFERRED, Phase.REDUCED, _FAILING_STEP),
    (Event.UPDATE_FAILURE, Phase.APPLIED): (SUBSET, Phase.APPLIED, _FAILING_STEP),
    (Event.UPDATE_FAILURE, Phase.STEPPED): (LOCAL, Phase.FAILED, "forward backward step failing_step step"),
    (Event.REMOVE, Phase.IDLE): (DEFERRED, Phase.FAILED, "remove register:same step"),
    (Event.REMOVE, Phase.REDUCED): (
        DEFERRED,
        Phase.FAILED,
        "forward backward remove ddp_zero_grad:T register:same step",
    ),
    (Event.REMOVE, Phase.APPLIED): (
        INTERLEAVED,
        Phase.APPLIED,
        "forward backward remove register:same forward backward",
    ),
    (Event.REMOVE, Phase.STEPPED): (
        INTERLEAVED,
        Phase.FAILED,
        "forward backward step remove register:same step",
    ),
    (Event.REMOVE, Phase.FAILED): (
        INTERLEAVED,
        Phase.FAILED,
        "forward failing_backward:first remove register:same step",
    ),
}

UNOBSERVABLE: dict[tuple[Event, Phase], str] = {
    (Event.FORWARD, Phase.BACKWARD): "DDP refuses a forward after an incomplete backward, with its own error",
    (Event.BACKWARD, Phase.BACKWARD): "needs a forward after an incomplete backward, which DDP refuses",
    (Event.REMOVE, Phase.BACKWARD): "DDP takes no other forward then, so the next registration serves nothing",
    **{
        (Event.FAILURE, phase): "a stage raises in a backward, whose first bucket has led to BACKWARD or FAILED"
        for phase in Phase
        if phase not in (Phase.BACKWARD, Phase.FAILED)
    },
    (Event.UPDATE_FAILURE, Phase.BACKWARD): "step() is refused before it calls the optimizer",
    (Event.UPDATE_FAILURE, Phase.FAILED): "step() is refused before it calls the optimizer",
    **{(Event.REPLAY, phase): "happens under Join alone" for phase in Phase},
}

# Of the methods that follow the table, each without effect: (form, what finds it).
METHODS: dict[str, tuple[str, int | str]] = {
    "check_reduced": (DEFERRED, 0),
    "check_step": (INTERLEAVED, "forward backward set_lr:0.02 step"),
    "hand_over": (INTERLEAVED, "forward backward edit:1 step"),
    "refuse": (INTERLEAVED, "forward backward edit:1 step"),
    "_refuse_replaced": (INTERLEAVED, "forward backward ddp_zero_grad:T step"),
    "note_applied": (INTERLEAVED, 1),
    "note_reduced": (DEFERRED, 0),
    "on_update_failure": (DEFERRED, "forward backward failing_step step"),
    "on_failure": (INTERLEAVED, "forward failing_backward:first forward"),
    "clear_applied": (INTERLEAVED, "forward backward step forward"),
    "clear_all": (INTERLEAVED, "forward failing_backward:first forward"),
    "clear_for_good": (INTERLEAVED, "forward backward step remove"),
}

MUTANTS: dict[str, Mutant] = {
    **{
        f"{event.name} x {phase.name} -> {outcome.name if isinstance(outcome, Phase) else 'refused'}": Mutant(
            form, _entry(event, phase, outcome), found_by
        )
        for (event, phase), (form, outcome, found_by) in ENTRIES.items()
    },
    **{f"{name} dropped": Mutant(form, _without(name), found_by) for name, (form, found_by) in METHODS.items()},
}


@contextlib.contextmanager
def _in_force(mutant: Mutant) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in mutant.patches():
            stack.enter_context(patch)
        yield


def _hunt(rank: int, world_size: int, names: list[str], limit: int) -> dict[str, tuple[int | str, str] | None]:
    """For each mutant the seed whose sequence found it, and what went wrong there."""
    found: dict[str, tuple[int | str, str] | None] = {}
    for name in names:
        mutant = MUTANTS[name]
        form = next(form for form in FORMS if form.name == mutant.form)
        found[name] = None
        for found_by in [mutant.found_by, *range(limit)]:
            script = parse(found_by) if isinstance(found_by, str) else draw(f"{form}:{found_by}")
            with _in_force(mutant):
                difference = Player(form, rank).play(script).difference
            if difference is not None:
                found[name] = found_by, difference
                break
        if rank == 0 and (found[name] or ("",))[0] != mutant.found_by:
            print(f"{name}: found by {found[name]}, no longer by {mutant.found_by!r}", flush=True)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int | str, str] | None]:
    results: dict[str, tuple[int | str, str] | None] = run_ranks(
        _hunt, 2, list(MUTANTS), _LIMIT, timeout_s=150, group_timeout_s=20
    )[0]
    return results


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", MUTANTS)
def test_random_loops_find_the_fault(found: dict[str, tuple[int | str, str] | None], name: str) -> None:
    assert found[name] is not None


def test_every_entry_of_the_table_has_a_mutant_or_a_reason() -> None:
    entries = {(event, phase) for event in Event for phase in Phase}
    assert entries == set(ENTRIES) | set(UNOBSERVABLE)
    assert not set(ENTRIES) & set(UNOBSERVABLE)
    for (event, phase), (_, outcome, _) in ENTRIES.items():
        assert TRANSITIONS[event][phase] != outcome, f"{event} x {phase} is no mutant"
