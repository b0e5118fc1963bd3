"""Processes that are lost, between two averages and within one: the others go on with the mean of those left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
from elastic_runs import (
    OUTER,
    PERIOD,
    assert_same,
    at,
    client,
    die,
    is_left_out,
    is_there,
    reference,
    results_of,
    train,
    wait_for,
)

DILOCO = pytest.mark.parametrize("is_diloco", [False, True], ids=["mean", "DiLoCo"])


def _outer(is_diloco: bool) -> dict[str, Any]:
    return {"outer": OUTER} if is_diloco else {}


def _killed_between(rank: int, world_size: int, port: int, is_diloco: bool) -> Any:
    def before(local: Any, store: Any) -> None:
        if rank == 1 and local.step_count == PERIOD + 1:
            die()

    return train(rank, port, 4 * PERIOD, before=before, **_outer(is_diloco))


@DILOCO
def test_who_is_killed_between_averages_is_left_out(is_diloco: bool) -> None:
    found = results_of(_killed_between, 3, is_diloco)
    expected = reference(3, [(0, 1, 2), (0, 2), (0, 2), (0, 2)], is_diloco=is_diloco)
    assert found[1] is None
    for rank in (0, 2):
        records, groups = found[rank]
        assert groups == [(0, 1, 2), (0, 2), (0, 2), (0, 2)]
        assert_same(records, expected[rank], what=f"rank {rank}")
        assert len(records) == 5


def _killed_within(rank: int, world_size: int, port: int, where: str, is_diloco: bool) -> Any:
    averages = []

    def fall() -> None:
        averages.append(1)
        if len(averages) == 2:
            die()

    if rank != 2:
        return train(rank, port, 3 * PERIOD, **_outer(is_diloco))
    with at(where, fall):
        return train(rank, port, 3 * PERIOD, **_outer(is_diloco))


@pytest.mark.parametrize("where", ["begin", "sum", "summed"])
@DILOCO
def test_an_average_in_which_one_is_killed_is_made_again_without_it(where: str, is_diloco: bool) -> None:
    # begin() is called once more, when the group forms.
    found = results_of(_killed_within, 3, where, is_diloco)
    first = 1 if where == "begin" else 2
    rounds = [(0, 1, 2)] * (first - 1) + [(0, 1)] * (4 - first)
    expected = reference(3, rounds, is_diloco=is_diloco)
    assert found[2] is None
    for rank in (0, 1):
        records, groups = found[rank]
        assert groups == rounds
        assert_same(records, expected[rank], what=f"rank {rank}")


def _killed_after_its_vote(rank: int, world_size: int, port: int) -> Any:
    from overlap.join import views

    vote, votes = views._vote, []

    def vote_and_fall(*arguments: Any) -> None:
        vote(*arguments)
        votes.append(1)
        if rank == 2 and len(votes) == 3:  # The first is that of the group that forms.
            die()

    views._vote = vote_and_fall
    return train(rank, port, 4 * PERIOD)


def test_an_average_that_is_decided_counts_who_is_killed_then() -> None:
    found = results_of(_killed_after_its_vote, 3)
    for rank in (0, 1):
        records, groups = found[rank]
        # The last to say that it has the mean decides: with the lost one, or if that was not the last, maybe without.
        assert groups[1] in [(0, 1, 2), (0, 1)]
        expected = reference(3, [(0, 1, 2), groups[1], (0, 1), (0, 1)])
        assert_same(records, expected[rank], what=f"rank {rank}")
    assert found[0][1] == found[1][1]


def _two_killed(rank: int, world_size: int, port: int, is_same_moment: bool) -> Any:
    def before(local: Any, store: Any) -> None:
        if rank in (0, 2) and local.step_count == PERIOD + (1 if is_same_moment or rank == 0 else PERIOD + 1):
            die()

    return train(rank, port, 4 * PERIOD, before=before, outer=OUTER)


@pytest.mark.parametrize("is_same_moment", [True, False], ids=["at once", "one after the other"])
def test_the_last_one_goes_on_alone(is_same_moment: bool) -> None:
    found = results_of(_two_killed, 3, is_same_moment)
    rounds = [(0, 1, 2), (1,) if is_same_moment else (1, 2), (1,), (1,)]
    records, groups = found[1]
    assert groups == rounds
    assert_same(records, reference(3, rounds, is_diloco=True)[1], what="the last one")
    assert found[0] is None and found[2] is None


def _raises(rank: int, world_size: int, port: int) -> Any:
    def before(local: Any, store: Any) -> None:
        if rank == 0 and local.step_count == PERIOD + 1:
            raise ValueError("this rank's data is broken")

    return train(rank, port, 3 * PERIOD, before=before)


def test_who_raises_leaves_and_the_others_go_on_though_its_process_lives() -> None:
    found = results_of(_raises, 3)
    assert isinstance(found[0], ValueError)
    expected = reference(3, [(0, 1, 2), (1, 2), (1, 2)])
    for rank in (1, 2):
        assert_same(found[rank][0], expected[rank], what=f"rank {rank}")


# Coming back ----------------------------------------------------------------------------------------------------


def _comes_back(rank: int, world_size: int, port: int, is_diloco: bool) -> Any:
    if rank == 3:
        store = client(port)
        wait_for(lambda: store.check(["overlap/elastic/2/view"]))

    def before(local: Any, store: Any) -> None:
        if rank == 1 and local.step_count == PERIOD + 1:
            die()
        if local.step_count == 2 * PERIOD + 1:  # One average without it, then it is there.
            wait_for(lambda: is_there(store, 3))

    return train(rank, port, 5 * PERIOD, before=before, **_outer(is_diloco))


@DILOCO
def test_a_new_process_is_taken_in_and_all_have_the_same_bits(is_diloco: bool) -> None:
    found = results_of(_comes_back, 4, is_diloco)
    rounds = [(0, 1, 2), (0, 2), (0, 2), (0, 2, 3), (0, 2, 3)]
    expected = reference(4, rounds, is_diloco=is_diloco)
    assert found[1] is None
    for rank in (0, 2, 3):
        records, groups = found[rank]
        assert_same(records, expected[rank], what=f"rank {rank}")
        assert groups[-2:] == [(0, 2, 3), (0, 2, 3)]
        assert records.keys() == ({9, 12, 15} if rank == 3 else {0, 3, 6, 9, 12, 15})


VICTIMS = {"sum": 2, "give": 0, "take": 3}
"""Who is killed where: a member, the one that gives the new one what it needs, and the new one."""


def _lost_while_another_comes(rank: int, world_size: int, port: int, where: str) -> Any:
    if rank == 3:
        store = client(port)
        wait_for(lambda: store.check(["overlap/elastic/1/view"]))

    def before(local: Any, store: Any) -> None:
        if local.step_count == PERIOD + 1:
            wait_for(lambda: is_there(store, 3))

    calls = []

    def fall() -> None:
        calls.append(1)
        # A member has averaged before, and the source has given its model when the group formed.
        if where == "take" or len(calls) == 2:
            die()

    with at(where, fall) if rank == VICTIMS[where] else contextlib.nullcontext():
        return train(rank, port, 4 * PERIOD, before=before, outer=OUTER)


@pytest.mark.parametrize("where", VICTIMS)
def test_one_is_lost_while_another_comes(where: str) -> None:
    found = results_of(_lost_while_another_comes, 4, where)
    # The average is made again without newcomers, and the next one takes the new process in.
    left = tuple(rank for rank in (0, 1, 2) if rank != VICTIMS[where])
    last = left if where == "take" else (*left, 3)
    expected = reference(4, [(0, 1, 2), left, left, last], is_diloco=True)
    for rank in last:
        assert_same(found[rank][0], expected[rank], what=f"rank {rank}")
        assert found[rank][1][-1] == last
    assert found[VICTIMS[where]] is None


# Slow ones ------------------------------------------------------------------------------------------------------


def _slow(rank: int, world_size: int, port: int) -> Any:
    def before(local: Any, store: Any) -> None:
        if rank == 1 and local.step_count == PERIOD + 1:
            wait_for(lambda: is_left_out(store, rank))
        if rank != 1 and local.step_count == 2 * PERIOD + 1:
            wait_for(lambda: is_there(store, 3))

    return train(rank, port, 4 * PERIOD, before=before, timeout=2)


def test_who_is_late_is_left_out_after_the_timeout_and_comes_back_with_the_current_model() -> None:
    found = results_of(_slow, 3)
    groups = [groups for _, groups in found]
    assert groups[0] == groups[2] == [(0, 1, 2), (0, 2), (0, 2, 3), (0, 2, 3)]
    assert groups[1] == [(0, 1, 2), (0, 2, 3), (0, 2, 3)]
    # Its place is the last from then on.
    for step in (9, 12):
        for name, value in found[0][0][step].items():
            assert value.equal(found[1][0][step][name]) and value.equal(found[2][0][step][name])


def _stopped(rank: int, world_size: int, port: int) -> Any:
    def before(local: Any, store: Any) -> None:
        if rank == 1 and local.step_count == PERIOD + 1 and not was_stopped:
            was_stopped.append(1)
            store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 0 and local.step_count == 2 * PERIOD + 1:
            if 1 not in local.members:
                os.kill(int(store.get("pid")), signal.SIGCONT)
            wait_for(lambda: is_there(store, 3))

    was_stopped: list[int] = []
    return train(rank, port, 5 * PERIOD, before=before, heartbeat_timeout=2)


def test_who_is_stopped_is_left_out_and_comes_back() -> None:
    found = results_of(_stopped, 3)
    for name, value in found[0][0][5 * PERIOD].items():
        assert all(value.equal(records[5 * PERIOD][name]) for records, _ in found)
    assert found[0][1][1] == (0, 2)
    assert found[0][1][-1] == found[1][1][-1] == found[2][1][-1] == (0, 2, 3)


# At any moment --------------------------------------------------------------------------------------------------


def _killed_at_any_moment(rank: int, world_size: int, port: int, seed: int) -> Any:
    moments = random.Random(1000 * seed + rank)
    if rank >= 3:
        time.sleep(moments.uniform(0, 0.4))
    if rank in (1, 2, 3):
        timer = threading.Timer(moments.uniform(0.05, 0.7), die)
        timer.daemon = True
        timer.start()

    def before(local: Any, store: Any) -> None:
        time.sleep(0.002)

    return train(rank, port, 60 * PERIOD, before=before, outer=OUTER, is_in_turn=rank < 3)


@pytest.mark.parametrize("seed", range(3))
def test_whenever_processes_are_killed_the_others_end_with_the_same_bits(seed: int) -> None:
    found = [one for one in results_of(_killed_at_any_moment, 5, seed) if one is not None]
    assert len(found) >= 2
    for records, groups in found:
        assert groups[-1] == found[0][1][-1]
        for step in records.keys() & found[0][0].keys():
            for name, value in records[step].items():
                assert value.equal(found[0][0][step][name]), f"{name} after step {step}"
