"""Lines through measurements, what reducers send, and saved profiles."""

from __future__ import annotations

import pytest
import torch

from overlap import AllReduce, Cast, Int8, PowerSGD, Quantize
from overlap.plan.buckets import cut
from overlap.plan.dry import dry_run
from overlap.plan.link import Line, fit
from overlap.plan.profile import ParameterTimes
from overlap.plan.wire_times import shares

SHAPES = {"a": (64, 32), "b": (64,), "c": (128, 64), "d": (128,)}
PARAMETERS = tuple(
    ParameterTimes(name=name, shape=shape, needed_ms=0, ready_ms=place)
    for place, (name, shape) in enumerate(SHAPES.items())
)
NUMEL = sum(one.numel for one in PARAMETERS)


def test_a_line_is_found_again_and_its_residuals_are_nothing() -> None:
    line = Line(latency_ms=0.3, bytes_per_ms=125_000)
    found = fit([(size, line.ms(size)) for size in (1000, 50_000, 10**6, 10**7)])
    assert found.latency_ms == pytest.approx(0.3)
    assert found.bytes_per_ms == pytest.approx(125_000)
    assert max(map(abs, found.residuals)) < 1e-9


def test_small_collectives_count_as_much_as_large_ones() -> None:
    """An absolute fit would give all its weight to the largest, and miss the latency by far."""
    points = [(1000, 1.0), (2000, 1.0), (10**7, 110.0), (2 * 10**7, 190.0)]
    found = fit(points)
    assert found.latency_ms == pytest.approx(1.0, rel=0.1)
    assert max(map(abs, found.residuals)) < 0.15


@pytest.mark.parametrize(
    ("sent", "ms"),
    [(100, 1.0), (2000, 1.0), (6000, 1.1), (10_000, 1.2), (15_000, 6.2), (100_000, 51.2), (200_000, 101.2)],
)
def test_what_was_measured_is_read_between_its_points_although_no_line_goes_through_them(sent: int, ms: float) -> None:
    """As with a bucket of tokens, which lets the first bytes through at once."""
    line = fit([(2000, 1.0), (10_000, 1.2), (20_000, 11.2), (100_000, 51.2)])
    assert max(map(abs, line.residuals)) > 0.1
    assert line.ms(sent) == pytest.approx(ms)


def test_more_never_takes_less_where_a_measurement_was_disturbed() -> None:
    line = fit([(1000, 1.0), (10_000, 9.0), (100_000, 8.0)])
    assert line.ms(50_000) >= 9.0
    assert line.ms(10**6) > line.ms(200_000) > 8.0


@pytest.mark.parametrize(
    "points", [[(1000, 1.0), (10**6, 0.5)], [(1000, 0.01), (10**6, 100.0)], [(5000, 2.0)]], ids=str
)
def test_neither_latency_nor_bandwidth_is_negative(points: list[tuple[int, float]]) -> None:
    found = fit(points)
    assert found.latency_ms >= 0
    assert found.bytes_per_ms > 0


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((100, 60, 100, 100), (1.0, 1.0)),
        ((100, 300, 100, 300), (1.0, 1.0)),
        ((100, 300, 200, 400), (0.5, 0.5)),
        ((100, 100, 1000, 1000), (0.5, 0.5)),
    ],
)
def test_what_computing_and_sending_take_from_each_other(
    measured: tuple[float, ...], expected: tuple[float, float]
) -> None:
    assert shares(*measured) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 64])
def test_an_all_reduce_and_a_cast_send_what_the_volumes_say(ranks: int) -> None:
    layout = (PARAMETERS[:2], PARAMETERS[2:])
    whole = [sum(cost.sent_bytes) for cost in dry_run(AllReduce(), layout, ranks=ranks, runs=1)]
    halved = [sum(cost.sent_bytes) for cost in dry_run(Cast(torch.float16, AllReduce()), layout, ranks=ranks, runs=1)]
    expected = [2 * 4 * sum(one.numel for one in bucket) * (ranks - 1) / ranks for bucket in layout]
    assert whole == pytest.approx(expected, abs=2)
    assert halved == pytest.approx([sent / 2 for sent in expected], abs=2)


def test_a_wire_and_low_rank_factors_send_less_and_every_collective_is_seen() -> None:
    ranks, layout = 8, (PARAMETERS,)
    (int8,) = dry_run(Quantize(Int8()), layout, ranks=ranks)
    assert sum(int8.sent_bytes) == pytest.approx(2 * NUMEL * (ranks - 1) / ranks, rel=0.3)
    (low_rank,) = dry_run(PowerSGD(rank=2), layout, ranks=ranks)
    factors = 2 * (64 + 32 + 128 + 64) + 64 + 128
    assert sum(low_rank.sent_bytes) == pytest.approx(2 * 4 * factors * (ranks - 1) / ranks, rel=0.05)
    assert len(low_rank.before_ms) == len(low_rank.kinds) == len(low_rank.sent_bytes) == 2
    assert all(ms > 0 for ms in low_rank.before_ms)


def test_buckets_of_different_dtypes_are_apart() -> None:
    mixed = [
        ParameterTimes(name=str(place), shape=(2**18,), dtype=dtype, needed_ms=0, ready_ms=place)
        for place, dtype in enumerate(["float32", "float16"] * 2)
    ]
    assert [[one.name for one in bucket] for bucket in cut(mixed, 1)] == [["0"], ["2"], ["1", "3"]]
