"""The least time that a step can take."""

from __future__ import annotations

from typing import Any

import pytest

from overlap.bench.floor import StepProfile, floor_ms

_PROFILE = StepProfile(compute_ms=100.0, ready_ms=(60.0, 70.0, 100.0), bucket_bytes=(1, 2, 1), update_ms={"sgd": 8.0})


def floor(kind: Any, sent_bytes: float) -> float:
    return floor_ms(kind, _PROFILE, optimizer="sgd", sent_bytes=sent_bytes, bandwidth_bytes_per_s=1000.0)


def test_on_a_fast_link_only_the_last_bucket_and_its_update_are_added() -> None:
    # 4 ms in all: each bucket is through before the next is ready, and the last takes 1 ms and its quarter of 8.
    assert floor("bucketed", 4.0) == pytest.approx(100 + 1 + 2)


def test_a_slow_link_is_busy_from_the_first_bucket_on() -> None:
    assert floor("bucketed", 400.0) == pytest.approx(60 + 400 + 2)


def test_a_bucket_waits_for_the_one_before_it() -> None:
    # 10, 20 and 10 ms: ready at 60, 70, 100, through at 70, 90, 110.
    assert floor("bucketed", 40.0) == pytest.approx(110 + 2)


def test_streamed_communication_is_bound_by_the_longer_of_computing_and_sending() -> None:
    assert floor("streamed", 40.0) == pytest.approx(108)
    assert floor("streamed", 400.0) == pytest.approx(400)


def test_the_floor_without_communication_is_the_computation() -> None:
    assert floor("compute", 400.0) == 100


def test_a_profile_scales_with_the_machine() -> None:
    scaled = _PROFILE.scaled_to(50.0)
    assert (scaled.ready_ms, scaled.update_ms) == ((30.0, 35.0, 50.0), {"sgd": 4.0})


def test_a_profile_without_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="ready_ms has 0 entries and bucket_bytes 1"):
        StepProfile(compute_ms=1.0, ready_ms=(), bucket_bytes=(1,), update_ms={})
