"""Whatever a training loop calls, in whatever order: it gets what plain DDP gives, or an error that was documented."""

from __future__ import annotations

import os

import pytest
from lifecycle_driver import search
from lifecycle_forms import FORMS, Form

from harness import run_ranks

SEQUENCES = int(os.environ.get("OVERLAP_SEQUENCES", "40"))
"""For each form."""
FIRST_SEED = int(os.environ.get("OVERLAP_FIRST_SEED", "0"))


@pytest.mark.timeout(180 + SEQUENCES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_random_loops_equal_plain_ddp(form: Form) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + SEQUENCES)
    result = run_ranks(search, 2, form, seeds, timeout_s=120 + SEQUENCES)[0]
    print(f"{form}: {result}")
