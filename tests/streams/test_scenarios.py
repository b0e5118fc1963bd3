"""Every scenario on two ranks: no race, no use after free, no wait of the host, and the values are right."""

from __future__ import annotations

import pytest

from harness import run_ranks
from harness.streams import STREAMS_BACKEND

from .play import outcomes
from .scenarios import TOPICS


@pytest.mark.parametrize("topic", TOPICS)
def test_every_scenario_is_right(topic: str) -> None:
    for rank, found in enumerate(run_ranks(outcomes, 2, list(TOPICS[topic]), backend=STREAMS_BACKEND, timeout_s=170)):
        errors = [f"{name}, rank {rank}: {outcome.error}" for name, outcome in found.items() if outcome.error]
        assert not errors, "\n\n".join(errors)
        assert all(outcome.operators > 100 for outcome in found.values())
