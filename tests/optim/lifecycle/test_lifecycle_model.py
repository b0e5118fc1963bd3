"""Whatever a training loop calls, in whatever order: it gets what plain DDP gives, or an error that was documented."""

from __future__ import annotations

import os

import pytest
from lifecycle_calls import parse
from lifecycle_driver import Player, search
from lifecycle_forms import FORMS, Form

from harness import run_ranks

SEQUENCES = int(os.environ.get("OVERLAP_SEQUENCES", "25"))
"""For each form."""
INLINE = ("step_interleaved", "step_automatic", "step_subset", "zero_gather_in_forward")
"""Forms that are played on autograd's thread, too, as those of small models."""
FIRST_SEED = int(os.environ.get("OVERLAP_FIRST_SEED", "0"))


@pytest.mark.timeout(180 + SEQUENCES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_random_loops_equal_plain_ddp(form: Form) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + SEQUENCES)
    result = run_ranks(search, 2, form, seeds, timeout_s=120 + SEQUENCES)[0]
    print(f"{form}: {result}")


@pytest.mark.timeout(180 + SEQUENCES)
@pytest.mark.parametrize("form", [form for form in FORMS if form.name in INLINE], ids=str)
def test_random_loops_of_inline_passes_equal_plain_ddp(form: Form) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + SEQUENCES // 2)
    inline = {"OVERLAP_SMALL_MODEL_BYTES": str(2**20)}
    result = run_ranks(search, 2, form, seeds, timeout_s=120 + SEQUENCES, env=inline)[0]
    print(f"{form}: {result}")


# Each of these lost, repeated or let pass an update once.
LOOPS = (
    ("step_deferred", "forward backward ddp_zero_grad:T step no_sync step"),
    ("step_deferred", "forward backward ddp_zero_grad:T own_gradient:1 step forward"),
    ("step_deferred", "own_gradient:1 failing_step step forward backward step"),
    ("step_subset", "forward backward edit:0 step step step"),
    ("step_subset", "forward backward edit:0 forward forward step forward backward step"),
    ("step_interleaved", "forward backward forward step backward step forward backward step"),
    # What gradients are after an update in backward.
    ("step_interleaved", "forward backward keep edit:all step forward backward step edit:1 forward"),
    ("step_interleaved", "forward backward ddp_zero_grad:T own_gradient:1 step step forward backward step"),
    ("step_interleaved", "forward backward decay step step ddp_zero_grad:F forward backward step"),
    ("step_automatic", "forward backward ddp_zero_grad:F own_gradient:1 forward backward"),
    ("step_released", "forward backward step edit:1 forward backward step edit:1 forward backward step"),
    ("step_released", "forward backward step own_gradient:1 edit:1 zero_grad:F forward backward step"),
    ("zero_interleaved", "forward backward edit:1 step data_edit:1 own_gradient:2 forward backward step"),
    ("zero_deferred", "forward backward edit:1 forward backward zero_grad:F forward backward step"),
)


def _play(rank: int, world_size: int) -> list[str | None]:
    forms = {form.name: form for form in FORMS}
    return [Player(forms[name], rank).play(parse(text)).difference for name, text in LOOPS]


@pytest.fixture(scope="module")
def differences() -> dict[tuple[str, str], str | None]:
    return dict(zip(LOOPS, run_ranks(_play, 2)[0], strict=True))


@pytest.mark.parametrize("loop", LOOPS, ids=" ".join)
def test_the_loop_equals_plain_ddp(differences: dict[tuple[str, str], str | None], loop: tuple[str, str]) -> None:
    assert differences[loop] is None
