"""The sharded update equals plain DDP and the same optimizer, from the first step, state included."""

from __future__ import annotations

import functools

import pytest
from zero_loops import FORMS, OPTIMIZERS, check, check_losses, plain_run, zero_run

from harness import run_ranks
from harness.models import CASES, MLP, Case


def _matrix(rank: int, world_size: int, name: str) -> None:
    cls, arguments = OPTIMIZERS[name]
    reference = plain_run(MLP, rank, functools.partial(cls, **arguments))
    for form, options in FORMS.items():
        if world_size != 2 and form.startswith("automatic"):
            continue
        candidate = zero_run(MLP, rank, cls, arguments, options)
        check(candidate, reference, what=f"{name}, {form}, {world_size} ranks", world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_form_equals_plain_ddp(world_size: int, name: str) -> None:
    run_ranks(_matrix, world_size, name)


def test_every_form_equals_plain_ddp_on_one_rank() -> None:
    run_ranks(_matrix, 1, "adamw")


def _case(rank: int, world_size: int, case: Case) -> None:
    cls, arguments = OPTIMIZERS["adamw"]
    reference = plain_run(case, rank, functools.partial(cls, **arguments))
    for form in ("interleaved", "deferred", "automatic, deferred", "alone"):
        candidate = zero_run(case, rank, cls, arguments, FORMS[form])
        check(candidate, reference, what=f"{form}, {case}", world_size=world_size)
    for form in ("interleaved, gather in forward", "deferred, gather in forward"):
        candidate = zero_run(case, rank, cls, arguments, FORMS[form], waits=False)
        check_losses(candidate, reference, what=f"{form}, {case}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kind_of_model_equals_plain_ddp(case: Case) -> None:
    run_ranks(_case, 2, case)
