"""What follows from the intervals of a step, and the table: no process group, no model."""

from __future__ import annotations

import pytest

from overlap.timeline import Interval, Phase, Report, StepReport
from timeline.samples import bucket, reduce, report, step


def test_forward_and_backward_are_the_phases_of_these_names() -> None:
    one = step()
    assert one.forward == Interval(4.0, 20.0)
    assert one.backward == Interval(22.0, 60.0)


def test_a_broadcast_of_buffers_and_the_last_buckets_collective_are_exposed() -> None:
    one = step()
    assert one.communication_ms == 4 + 14 + 20
    assert one.exposed_ms == 4 + 20
    assert one.overlap_fraction == pytest.approx(14 / 38)


def test_the_last_buckets_update_is_exposed_code() -> None:
    assert step().exposed_code_ms == pytest.approx(5.1)


def test_bytes_of_a_step_are_those_of_its_buckets() -> None:
    one = step()
    assert (one.sent_bytes, one.gradient_bytes) == (2000, 2000)


def test_a_bucket_tells_when_it_was_reduced_and_updated() -> None:
    first, _ = step().buckets
    assert (first.ready_ms, first.reduce, first.update, first.gather) == (
        40.0,
        Interval(41.0, 55.0),
        Interval(56.0, 57.0),
        None,
    )


def test_the_update_of_a_bucket_is_the_longest_stretch_of_its_code() -> None:
    _, last = step().buckets
    assert last.update == Interval(80.0, 85.0)
    assert last.done_ms == 85.1


def test_a_step_without_communication_has_nothing_exposed() -> None:
    one = StepReport(rank=0, step=0, start_ms=0.0, step_ms=9.0, phases=(Phase(5.0, 6.0, "finalization"),), buckets=())
    assert (one.communication_ms, one.exposed_ms, one.exposed_code_ms, one.overlap_fraction) == (0, 0, 0, None)
    assert one.forward is None


def test_waiting_for_a_collective_in_the_middle_of_backward_is_exposed() -> None:
    one = StepReport(
        rank=0,
        step=0,
        start_ms=0.0,
        step_ms=50.0,
        phases=(Phase(0.0, 40.0, "backward"), Phase(10.0, 15.0, "wait"), Phase(40.0, 41.0, "finalization")),
        buckets=(bucket(0, 10.0, reduce(10.0, 15.0)),),
    )
    assert (one.exposed_ms, one.overlap_fraction) == (5.0, 0.0)


# As text -----------------------------------------------------------------------------------------------------


def test_a_report_is_a_table_with_a_line_for_each_step() -> None:
    lines = str(report()).splitlines()
    assert lines[0] == "plain DDP on 2 ranks, times in ms"
    assert " ".join(lines[1].split()) == (
        "rank step step ms forward backward finalization optimizer communication exposed overlapped sent MB"
    )
    assert " ".join(lines[2].split()) == "0 0 100.0 16.0 38.0 30.0 3.0 38.0 24.0 37% 0.00"
    assert len({len(line) for line in lines[1:8]}) == 1, "columns are aligned"


def test_a_table_ends_with_the_buckets_of_the_median_step() -> None:
    lines = str(report()).splitlines()
    assert lines[9].startswith("buckets of step 2 on rank 0")
    assert " ".join(lines[-1].split()) == "1 0.00 60.0 60.0 to 80.0 80.0 to 85.0 - 0.00"


def test_a_report_without_steps_says_so() -> None:
    assert "no step was recorded" in str(Report(title="plain DDP", ranks=((), ())))
