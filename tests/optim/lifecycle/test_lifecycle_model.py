"""Whatever a training loop calls, in whatever order: it gets what plain DDP gives, or an error that was documented."""

import os

import pytest
from lifecycle_calls import parse
from lifecycle_driver import Player, search
from lifecycle_forms import FORMS

from harness import on_ranks, run_ranks

SEQUENCES = int(os.environ.get("OVERLAP_SEQUENCES", "8"))
"""For each form."""
FIRST_SEED = int(os.environ.get("OVERLAP_FIRST_SEED", "0"))


@pytest.mark.timeout(180 + 6 * SEQUENCES)
@pytest.mark.parametrize("kind", ["step", "zero", "local"])
@on_ranks(2, timeout_s=120 + 6 * SEQUENCES)
def test_random_loops_equal_plain_ddp(rank: int, world_size: int, kind: str) -> None:
    search([form for form in FORMS if form.name.startswith(kind)], rank, range(FIRST_SEED, FIRST_SEED + SEQUENCES))


# Each of these lost, repeated or let pass an update once.
LOOPS = (
    ("step_deferred", "forward backward ddp_zero_grad:T step no_sync step"),
    ("step_deferred", "forward backward ddp_zero_grad:T own_gradient:1 step forward"),
    ("step_deferred", "own_gradient:1 failing_step step forward backward step"),
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
    # Each of these fails where one entry of the table of phases leads elsewhere.
    ("step_deferred", "forward backward forward step"),
    ("step_interleaved", "forward backward forward backward"),
    ("step_deferred", "forward backward forward failing_step backward"),
    ("step_deferred", "step step"),
    ("step_deferred", "incomplete_backward zero_grad:T step"),
    ("step_interleaved", "forward backward step ddp_zero_grad:T step"),
    ("step_interleaved", "forward failing_backward:first ddp_zero_grad:T load step"),
    ("step_interleaved", "forward failing_backward:first zero_grad:T step forward"),
    ("step_deferred", "zero_grad:T step load step"),
    ("step_deferred", "forward backward zero_grad:T own_gradient:1 step forward"),
    ("step_interleaved", "forward backward zero_grad:T load"),
    ("step_interleaved", "forward backward step zero_grad:F step"),
    ("step_deferred", "forward backward load step forward"),
    ("step_interleaved", "forward backward step load forward"),
    ("step_interleaved", "forward backward step forward failing_step"),
    ("step_deferred", "incomplete_backward zero_grad:T load step"),
    ("step_deferred", "no_sync zero_grad:F failing_step step"),
    ("step_deferred", "forward backward failing_step step"),
    ("local_before_start", "forward backward step failing_step step"),
    ("step_deferred", "remove register:same step"),
    ("step_deferred", "forward backward remove ddp_zero_grad:T register:same step"),
    ("step_interleaved", "forward backward remove register:same forward backward"),
    ("step_interleaved", "forward backward step remove register:same step"),
    ("step_interleaved", "forward failing_backward:first remove register:same step"),
    ("step_interleaved", "forward backward set_lr:0.02 step"),
    ("step_interleaved", "forward backward ddp_zero_grad:T step"),
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
