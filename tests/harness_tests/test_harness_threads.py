"""Ranks as threads: how their failures are told, and what they leave behind."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from on_ranks import gradient, one_raises, reduced

from harness import RankFailed, RankHung, run_ranks, run_threads


def test_results_come_in_rank_order() -> None:
    assert [rank for rank, _ in run_threads(reduced, 3, 2.0)] == [0, 1, 2]


def test_a_rank_that_raises_is_named_whether_its_peer_waits_already_or_not() -> None:
    for _ in range(10):
        with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*boom") as caught:
            run_threads(one_raises, 2, ValueError("boom"))
        assert isinstance(caught.value.exception, ValueError)


def _one_is_absent(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def test_a_hang_shows_the_stack_and_the_next_world_works() -> None:
    with pytest.raises(RankHung) as caught:
        run_threads(_one_is_absent, 2, timeout_s=1)
    assert "rank 0 had no result" in str(caught.value)
    assert "in _one_is_absent" in str(caught.value)
    assert [rank for rank, _ in run_threads(reduced, 2, 1.0)] == [0, 1]


def _reduced_in_a_thread(rank: int, world_size: int) -> float:
    group = dist.new_group(list(range(world_size)))
    tensor = torch.tensor([rank + 1.0])
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,), kwargs={"group": group})
    thread.start()
    thread.join()
    return tensor.item()


def test_a_thread_that_a_rank_starts_is_in_its_world() -> None:
    assert run_threads(_reduced_in_a_thread, 2) == [3.0, 3.0]


def test_global_state_is_put_back() -> None:
    world, start = dist.distributed_c10d._world, threading.Thread.start
    multithreading, torch_threads = torch._C._is_multithreading_enabled(), torch.get_num_threads()
    for _ in range(3):
        run_threads(gradient, 2)
    run_ranks(gradient, 2)
    assert dist.distributed_c10d._world is world
    assert threading.Thread.start is start
    assert torch._C._is_multithreading_enabled() == multithreading
    assert torch.get_num_threads() == torch_threads
    assert not dist.is_initialized()
