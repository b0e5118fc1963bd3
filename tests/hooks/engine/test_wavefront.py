"""The order of collectives by itself, without tensors or ranks. See [Note: one order of collectives]."""

from hypothesis import given
from hypothesis import strategies as st

from overlap.hooks.collectives import Operation, whole_pass
from overlap.hooks.engine.wavefront import Wavefront


class Bucket:
    """Issues one collective per advance and writes it to a log; `"|"` stands for the wait for the whole pass."""

    def __init__(self, name: str, collectives: list[str], log: list[str]) -> None:
        self.subject = name
        self._left = list(collectives)
        self._log = log

    def advance(self) -> Operation | None:
        if not self._left:
            return None
        current = self._left.pop(0)
        self._log.append(self.subject + current)
        return whole_pass() if current == "|" else Operation()


def _run(plans: list[list[str]]) -> list[str]:
    log: list[str] = []
    wavefront = Wavefront(lambda name: log.append(f"{name}."))
    for index, plan in enumerate(plans):
        wavefront.arrive(Bucket("abcdefgh"[index], plan, log), is_last=index == len(plans) - 1)
    assert [log.count(f"{name}.") for name in "abcdefgh"[: len(plans)]] == [1] * len(plans)
    return log


def test_the_order_that_the_note_promises() -> None:
    log = [entry for entry in _run([["1", "2"]] * 3) if not entry.endswith(".")]
    assert log == ["a1", "b1", "a2", "c1", "b2", "c2"]


def test_the_whole_pass_waits_for_the_last_bucket() -> None:
    log = _run([["1", "|", "2"], ["1", "1", "|"], ["1", "|"]])
    releases = [log.index(entry) for entry in ("a2", "b.", "c.")]
    arrivals = [log.index(entry) for entry in ("a|", "b|", "c|")]
    assert max(arrivals) < min(releases)


def test_a_bucket_that_never_waits_does_not_hold_up_those_that_do() -> None:
    log = _run([["|"], ["1", "1", "1"], []])
    assert log[-1] == "a." and log.index("a.") > log.index("b.")


@given(st.lists(st.lists(st.sampled_from(["1", "2", "|"]), max_size=4), min_size=1, max_size=8))
def test_every_collective_runs_once_and_in_its_buckets_order(plans: list[list[str]]) -> None:
    log = _run(plans)
    for name, plan in zip("abcdefgh", plans, strict=False):
        assert [entry[1:] for entry in log if entry[0] == name] == [*plan, "."]
