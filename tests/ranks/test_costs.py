"""What ranks ask the store, and which groups they make, does not grow with their number."""

import collections
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from overlap.ranks import board as boards_of_ranks
from overlap.ranks import machines
from overlap.ranks.board import Agreement, PerRank

# Of a rank that need not wait, where it neither is rank 0 nor comes last.
RANK = {"set": 1, "add": 1, "check": 1, "get": 1, "delete_key": 2}
RANK_0 = RANK | {"check": 2, "get": 2, "multi_get": 1, "multi_set": 1, "delete_key": 4}


class _Counting:
    """A store that counts what it is asked, and answers when what is asked for is there."""

    def __init__(self, store: Any, *, waits: bool) -> None:
        self._store, self._waits = store, waits
        self.asked: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.asked[name] += 1
            if name == "check" and self._waits:
                self._store.wait(*arguments)
            return getattr(self._store, name)(*arguments)

        return ask


class _Group:
    """One rank's view of a group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.name = (lambda: rank), (lambda: size), (lambda: "simulated")

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError("no backend")


def _agreed(group: Any, value: Any, decide: Any, *, waits: bool = True) -> tuple[Any, collections.Counter[str]]:
    """The answer, and what the store was asked."""
    with Agreement(group, "compare") as agreement:
        board: Any = agreement._board
        counting = board._store = _Counting(board._store, waits=waits)
        return agreement.agree(value, decide), counting.asked


@pytest.mark.parametrize("size", [8, 512])
def test_a_rank_asks_the_store_equally_often_on_8_and_on_512_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(boards_of_ranks, "group_store", lambda group: store)
    groups: list[Any] = [_Group(rank, size) for rank in range(size)]
    threading.stack_size(2**18)
    with ThreadPoolExecutor(size) as ranks:
        for decide, expected in ((sum, [sum(range(size))] * size), (lambda values: PerRank(values[::-1]), range(size))):
            found = list(ranks.map(lambda group, decide=decide: _agreed(group, group.rank(), decide), groups))
            assert [answer for answer, _ in found] == list(expected)[:: 1 if decide is sum else -1]
            (last,) = [rank for rank, (_, asked) in enumerate(found) if asked["set"] == 2]
            for rank, (_, asked) in enumerate(found):
                assert asked == (RANK if rank else RANK_0) | {"set": 1 + (rank == last)}, rank
            assert sum(asked.total() for _, asked in found) == 6 * size + 7
            assert store.num_keys() == 0, "all is deleted"
    threading.stack_size(0)


def _on_16_ranks(rank: int, world_size: int) -> tuple[Any, dict[str, int]]:
    answer, asked = _agreed(dist.group.WORLD, rank, PerRank, waits=False)
    dist.barrier()
    return answer, dict(asked)


def test_16_processes_ask_as_often() -> None:
    for rank, (answer, asked) in enumerate(run_ranks(_on_16_ranks, 16)):
        expected = RANK if rank else RANK_0
        assert answer == rank
        assert {**asked, "check": 0, "set": 1} == {**expected, "check": 0}, "all but the polls"
        assert asked["check"] < 100, "the longer it has waited, the longer it pauses"


HOSTS = {
    "four machines of eight": ([host for host in "abcd" for _ in range(8)], {}, True, None),
    "ranks in turns": (list("abc" * 4), {}, True, None),
    "one machine": (["a"] * 8, {}, False, None),
    "one rank on each": (list("abcd"), {}, False, None),
    "unequal machines": (list("aaabb"), {}, False, "2 to 3 ranks: start as many on each; .* about 2.5 times"),
    "one name for two machines": (
        ["a"] * 16, {"LOCAL_WORLD_SIZE": "8"}, False,
        "started 8 ranks here, and 16 are called 'a': give each machine .* about 4.9 times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_a_rank_knows_its_machine_and_the_ranks_of_its_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, setting, has_levels, warning = HOSTS[name]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for key, value in setting.items():
        monkeypatch.setenv(key, value)
    places = machines.places(hosts)
    for rank, (machine, column, told) in enumerate(places):
        same = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        assert machine == (None if len(same) == len(hosts) else same)
        number = same.index(rank)
        numbers = [hosts[:other].count(host) for other, host in enumerate(hosts)]
        assert column == ([other for other, own in enumerate(numbers) if own == number] if has_levels else None)
        assert (not told) == (warning is None or rank > 0)
    if warning is not None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        group: Any = _Group(0, len(hosts))
        machines.note_place(group, places[0])
        with pytest.warns(UserWarning, match=warning) as found:
            assert [machines.levels_of(group, torch.device("cpu")) for _ in range(2)] == [None, None]
        assert len(found) == 1


def _of_some_ranks(rank: int, world_size: int) -> tuple[int, float]:
    """The levels of ranks 1 to 4 of 5, which are in different numbers of groups; made, destroyed and made again."""
    some = dist.new_group([1, 2, 3, 4])
    dist.new_group([0, 1, 2])
    if rank == 0:
        return 0, 0.0
    socket.gethostname = lambda: "ab"[rank // 3]
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as made:
        for _ in range(2):
            levels = machines.levels_of(some, torch.device("cpu"))
            assert levels is not None
            value = torch.tensor([10.0**rank])
            for group in (levels.inside, levels.between):
                dist.all_reduce(value, group=group)
            dist.barrier(some)
            machines.forget(some)
    return made.call_count, float(value)


def test_a_rank_makes_two_groups_without_the_jobs_other_ranks() -> None:
    assert run_ranks(_of_some_ranks, 5)[1:] == [(2 * 2, 11110.0)] * 4
