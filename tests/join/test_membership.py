"""Views are agreed by whoever is there: who is late, lost or far behind is never in two groups at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from overlap.errors import CollectiveError, ConfigurationError
from overlap.join.membership import Membership
from overlap.join.views import Limits, View, ViewFailed

_PREFIX = "membership"


def _limits(**changes: float) -> Limits:
    chosen: dict[str, Any] = {
        "world_size": 2, "min_size": 1, "timeout_s": 10, "join_timeout_s": 10, "heartbeat_timeout_s": 10,
    }  # fmt: skip
    return Limits(**{**chosen, **changes})


def _processes(store: Any, count: int, **changes: float) -> list[Membership]:
    made = [Membership(store, _PREFIX, _limits(**changes), "the same") for _ in range(count)]
    for one in made:
        one.enter(0)
    return made


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each in a thread."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a call waits in vain"
    return found


def _deadline() -> float:
    return time.monotonic() + 10


def _formed(*processes: Membership) -> None:
    def form(one: Membership) -> None:
        one.commit(one.await_view(_deadline()))

    assert _together(*(lambda one=one: form(one) for one in processes)) == [None] * len(processes)


def _round(*processes: Membership) -> list[View | None]:
    """A round of these, which they all take part in if they are let."""

    def take_part(one: Membership) -> View | None:
        view = one.gather()
        if view is not None:
            one.commit(view)
        return view

    return _together(*(lambda one=one: take_part(one) for one in processes))


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture(autouse=True)
def _leave(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    entered: list[Membership] = []
    enter = Membership.enter

    def noted(self: Membership, step: int) -> None:
        entered.append(self)
        enter(self, step)

    monkeypatch.setattr(Membership, "enter", noted)
    yield
    for one in entered:
        one.leave()


def test_a_group_forms_when_enough_have_come_and_who_is_furthest_gives_its_model(store) -> None:
    first, second = (Membership(store, _PREFIX, _limits(), "the same") for _ in range(2))
    first.enter(3)
    assert first.agreement.ask(first._invitation) is None
    second.enter(7)
    views = _together(lambda: first.await_view(_deadline()), lambda: second.await_view(_deadline()))
    assert views[0] == views[1]
    assert (views[0].members, views[0].newcomers, views[0].source) == ((), (1, 0), 1)


def test_a_group_forms_without_who_was_lost_while_it_did(store) -> None:
    first, second = _processes(store, 2)
    view = first.await_view(_deadline())
    second.leave("it was killed")
    with pytest.raises(ViewFailed, match=r"process 1 on .* has left"):
        first.commit(view)
    (third,) = _processes(store, 1)
    _formed(first, third)
    assert first.view is not None and first.view.newcomers == (0, 2)


def test_who_is_left_decides_against_a_first_view_whose_processes_are_all_lost(store) -> None:
    first, second = _processes(store, 2)
    first.await_view(_deadline())
    first.leave()
    second.leave()
    third, fourth = _processes(store, 2)
    _formed(third, fourth)
    assert third.view is not None and third.view.everyone == (2, 3)


def test_who_is_late_is_left_out_and_never_proposes_again(store) -> None:
    first, second = _processes(store, 2, timeout_s=0.05)
    _formed(first, second)
    (view,) = _round(first)
    assert view is not None and view.members == (0,)
    assert second.gather() is None


def test_who_is_far_behind_is_left_out_where_the_keys_are_deleted(store) -> None:
    first, second = _processes(store, 2, timeout_s=0.05)
    _formed(first, second)
    for _ in range(20):
        assert _round(first)[0] is not None
    assert not store.check([f"{_PREFIX}/1/view"]) and store.check([f"{_PREFIX}/20/view"])
    assert second.gather() is None
    assert not store.check([f"{_PREFIX}/1/view"])
    assert store.num_keys() < 100


def test_a_newcomer_is_given_the_result_of_the_round_in_which_it_is_found(store) -> None:
    first, second = _processes(store, 2)
    _formed(first, second)
    (third,) = _processes(store, 1)

    def come() -> None:
        third.commit(third.await_view(_deadline()))

    def train(one: Membership) -> View | None:
        view = one.gather()
        assert view is not None
        one.commit(view)
        return view

    found = _together(lambda: train(first), lambda: train(second), come)
    assert (found[0].members, found[0].newcomers, found[0].receivers) == ((0, 1), (2,), (2,))
    assert [view.members for view in _round(first, second, third)] == [(0, 1, 2)] * 3


def test_after_a_failure_no_newcomer_is_taken_and_many_failures_are_an_error(store) -> None:
    first, second = _processes(store, 2)
    _formed(first, second)
    _processes(store, 1)
    seen = []

    def fail(one: Membership) -> None:
        while True:
            view = one.gather()
            assert view is not None
            seen.append((view.number, view.newcomers))
            with pytest.raises(ViewFailed):
                one.agreement.reject(view, "the link is broken")

    for error in _together(lambda: fail(first), lambda: fail(second)):
        assert isinstance(error, CollectiveError)
        assert "failed 3 times, the last time because the link is broken" in str(error)
    assert sorted(set(seen)) == [(1, (2,)), (2, ()), (3, ())]


def test_the_first_decision_holds_for_all(store) -> None:
    first, second = _processes(store, 2)
    _formed(first, second)
    views = _together(first.gather, second.gather)

    def reject(one: Membership) -> None:
        one.agreement.reject(views[0], f"process {one.number} says so")

    reasons = {str(one) for one in _together(lambda: reject(first), lambda: reject(second))}
    assert len(reasons) == 1 and reasons <= {"process 0 says so", "process 1 says so"}


def test_nothing_is_committed_that_one_rejects(store) -> None:
    first, second = _processes(store, 2)
    _formed(first, second)
    views = _together(first.gather, second.gather)

    def reject() -> None:
        time.sleep(0.05)
        first.agreement.reject(views[0], "the link is broken")

    assert [str(one) for one in _together(reject, lambda: second.commit(views[1]))] == ["the link is broken"] * 2


def test_too_few_wait_for_others_and_say_so(store) -> None:
    first, second = _processes(store, 2, min_size=2, join_timeout_s=0.2)
    _formed(first, second)
    second.leave("it was killed")
    with pytest.raises(CollectiveError, match=r"1 processes are left, min_size is 2, .*process 1 on .* has left"):
        first.gather()


def test_too_few_go_on_when_another_comes(store) -> None:
    first, second = _processes(store, 2, min_size=2)
    _formed(first, second)
    second.leave()
    third = Membership(store, _PREFIX, _limits(), "the same")

    def come() -> None:
        time.sleep(0.1)
        third.enter(0)
        third.commit(third.await_view(_deadline()))

    found = _together(lambda: _round(first)[0], come)
    assert (found[0].members, found[0].newcomers) == ((0,), (2,))


def test_who_comes_when_nobody_is_left_says_that_the_model_is_lost(store) -> None:
    first, second = _processes(store, 2, heartbeat_timeout_s=0.2)
    _formed(first, second)
    first.leave("ValueError: no")
    second.leave()
    (third,) = _processes(store, 1, heartbeat_timeout_s=0.2)
    with pytest.raises(CollectiveError, match=r"no member .* is left.*process 0 on .* \(ValueError: no\).*is new"):
        third.await_view(_deadline())


def test_who_waits_in_vain_says_for_what(store) -> None:
    first, second = _processes(store, 2, world_size=3)
    with pytest.raises(CollectiveError, match=r"process 0 waited 10 s \(join_timeout\) for world_size=3 .* 2 came"):
        first.await_view(time.monotonic())
    third = _processes(store, 1, world_size=3)[0]
    _formed(first, second, third)
    (fourth,) = _processes(store, 1)
    with pytest.raises(CollectiveError, match="for the average at which it would be taken in"):
        fourth.await_view(time.monotonic())


def test_who_gives_no_sign_of_life_is_lost_and_who_does_is_not(store) -> None:
    first, second = _processes(store, 2, heartbeat_timeout_s=0.5)
    _formed(first, second)
    assert second._heartbeat is not None
    assert first.agreement.liveness.lost(store_of(store), [1]) == {}
    time.sleep(1)
    assert first.agreement.liveness.lost(store_of(store), [1]) == {}
    second._heartbeat.stop()
    time.sleep(0.1)  # What was found a moment ago holds: it would not see the last beat.
    first.agreement.liveness.lost(store_of(store), [1])
    time.sleep(1)
    assert "no sign of life for 0.5 s" in first.agreement.liveness.lost(store_of(store), [1])[1]
    assert not first.agreement.liveness.is_gone(1)


def store_of(store: Any) -> Any:
    return dist.PrefixStore(_PREFIX, store)


def test_another_model_is_refused(store) -> None:
    _processes(store, 1)
    with pytest.raises(ConfigurationError, match=r"here they are another, and in the group the same"):
        Membership(store, _PREFIX, _limits(), "another").enter(0)
