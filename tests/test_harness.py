"""The harness itself: a helper that lets a failure pass would make every other test worthless."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import (
    RankDied,
    RankFailed,
    RankHung,
    Record,
    UnpicklableError,
    assert_parity,
    bucket_calls,
    bucket_sizes_bytes,
    overlapped_step,
    run_ranks,
    run_threads,
    train,
    wrap,
)
from harness.models import CASES, MIN_BUCKETS, MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error

BOTH = pytest.mark.parametrize("run", [run_ranks, run_threads])


class Clumsy(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, field: str, value: int) -> None:
        super().__init__(f"{field}={value}")


def reduced(rank: int, world_size: int, factor: float) -> tuple[int, Tensor]:
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    return rank, tensor * factor


def preparation(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "given": os.environ.get("GIVEN"),
        "inherited": os.environ.get("INHERITED"),
        "initialized": dist.is_initialized(),
        "dynamo": "torch._dynamo" in sys.modules,
    }


def one_raises(rank: int, world_size: int, error: Exception) -> None:
    if rank == 1:
        raise error
    dist.barrier()


def one_dies(rank: int, world_size: int, sign: int | None) -> None:
    if rank == 1:
        print("last words", flush=True)
        if sign is not None:
            os.kill(os.getpid(), sign)
        os._exit(7)
    dist.barrier()


def one_sleeps_on(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def one_sleeps(rank: int, world_size: int) -> int:
    time.sleep(60 * rank)
    return rank


def one_is_absent(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def barrier_and_pid(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    one_sleeps_on(rank, world_size)


def warns(rank: int, world_size: int) -> None:
    warnings.warn("a warning", stacklevel=1)


def fails_in_a_thread(rank: int, world_size: int) -> None:
    thread = threading.Thread(target=[].pop)
    thread.start()
    thread.join()


def reduced_in_a_thread(rank: int, world_size: int) -> float:
    group = dist.new_group(list(range(world_size)))
    tensor = torch.tensor([rank + 1.0])
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,), kwargs={"group": group})
    thread.start()
    thread.join()
    return tensor.item()


def gradient(rank: int, world_size: int) -> Tensor:
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    ddp(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert ddp.module.weight.grad is not None
    return ddp.module.weight.grad


def buckets_of(rank: int, world_size: int, case: Case) -> tuple[list[list[int]], list[int]]:
    """Sizes that a hook sees at each step, and what `bucket_sizes_bytes` says after them."""
    seen: list[list[int]] = []
    ddp = wrap(case.model(), **case.ddp_options())

    def record(state: None, bucket: Any) -> Any:
        seen[-1].append(bucket.buffer().numel() * bucket.buffer().element_size())
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    record.__annotations__.clear()  # DDP refuses annotations that are strings
    ddp.register_comm_hook(None, record)
    for batch in case.batches(rank, steps=3):
        seen.append([])
        mean_squared_error(ddp, batch).backward()
    return seen, bucket_sizes_bytes(ddp)


def trained(rank: int, world_size: int, case: Case, **options: Any) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return train(ddp, optimizer, case.batches(rank, steps=4), gradients=True, **options)


class TestProcesses:
    def test_results_come_in_rank_order(self) -> None:
        results = run_ranks(reduced, 3, 2.0)
        assert [rank for rank, _ in results] == [0, 1, 2]
        assert all(torch.equal(tensor, torch.full((3,), 12.0)) for _, tensor in results)

    def test_a_rank_is_prepared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INHERITED", "yes")
        (facts,) = run_ranks(preparation, 1, env={"GIVEN": "too"}, backend=None)
        assert facts == {
            "threads": 1,
            "omp": "1",
            "given": "too",
            "inherited": "yes",
            "initialized": False,
            "dynamo": True,
        }

    def test_closures_run(self) -> None:
        offset = 10
        assert run_ranks(lambda rank, world_size: rank + offset, 2, backend=None) == [10, 11]

    def test_a_rank_that_raises_is_named_with_its_traceback(self) -> None:
        began_s = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*in one_raises[\s\S]*boom") as caught:
            run_ranks(one_raises, 2, ValueError("boom"))
        assert caught.value.rank == 1
        assert isinstance(caught.value.exception, ValueError)
        assert time.monotonic() - began_s < 5

    @pytest.mark.parametrize(("sign", "exitcode"), [(None, 7), (signal.SIGKILL, -9), (signal.SIGSEGV, -11)])
    def test_a_rank_that_dies_is_named(self, sign: int | None, exitcode: int) -> None:
        began_s = time.monotonic()
        with pytest.raises(RankDied, match=rf"rank 1 died with exit code {exitcode}[\s\S]*last words") as caught:
            run_ranks(one_dies, 2, sign)
        assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
        assert time.monotonic() - began_s < 5

    def test_a_hang_shows_the_stacks_of_every_rank_and_leaves_no_process(self, tmp_path: Path) -> None:
        with pytest.raises(RankHung) as caught:
            run_ranks(barrier_and_pid, 2, tmp_path, timeout_s=2)
        message = str(caught.value)
        assert "rank 0 had no result after 2 s" in message
        assert "rank 1 had no result after 2 s" in message
        assert "in barrier" in message
        assert "in one_sleeps_on" in message
        for rank in range(2):
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / str(rank)).read_text()), 0)

    def test_a_collective_gives_up_after_the_group_timeout(self) -> None:
        began_s = time.monotonic()
        with pytest.raises(RankFailed, match="rank 0 raised"):
            run_ranks(one_sleeps_on, 2, group_timeout_s=1)
        assert time.monotonic() - began_s < 5

    def test_exceptions_can_be_returned(self) -> None:
        peer, cause = run_ranks(one_raises, 2, KeyError("k"), return_exceptions=True)
        assert isinstance(peer, RuntimeError)
        assert isinstance(cause, KeyError)
        assert "in one_raises" in cause.__notes__[0]
        peer, death = run_ranks(one_dies, 2, None, return_exceptions=True)
        assert isinstance(peer, RuntimeError)
        assert isinstance(death, RankDied)
        assert death.exitcode == 7
        result, hung = run_ranks(one_sleeps, 2, return_exceptions=True, timeout_s=1.5)
        assert result == 0
        assert isinstance(hung, RankHung)

    def test_an_exception_that_does_not_unpickle_is_still_told(self) -> None:
        with pytest.raises(RankFailed, match="Clumsy: field=3") as caught:
            run_ranks(one_raises_clumsily, 1, backend=None)
        assert isinstance(caught.value.exception, UnpicklableError)

    def test_warnings_are_errors(self) -> None:
        with pytest.raises(RankFailed, match="UserWarning: a warning"):
            run_ranks(warns, 1, backend=None)

    def test_an_exception_in_a_thread_fails_its_rank(self) -> None:
        with pytest.raises(RankFailed, match="pop from empty list"):
            run_ranks(fails_in_a_thread, 1, backend=None)


def one_raises_clumsily(rank: int, world_size: int) -> None:
    raise Clumsy("field", 3)


class TestThreads:
    def test_results_come_in_rank_order(self) -> None:
        assert [rank for rank, _ in run_threads(reduced, 3, 2.0)] == [0, 1, 2]

    def test_a_rank_that_raises_is_named(self) -> None:
        for _ in range(20):  # whether the peer waits already or not
            with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*boom") as caught:
                run_threads(one_raises, 2, ValueError("boom"))
            assert isinstance(caught.value.exception, ValueError)

    def test_a_hang_shows_the_stack(self) -> None:
        with pytest.raises(RankHung, match=r"rank 0 had no result[\s\S]*in one_is_absent"):
            run_threads(one_is_absent, 2, timeout_s=1)
        assert [rank for rank, _ in run_threads(reduced, 2, 1.0)] == [0, 1]

    def test_a_thread_of_a_rank_is_in_its_world(self) -> None:
        assert run_threads(reduced_in_a_thread, 2) == [3.0, 3.0]

    def test_global_state_is_put_back(self) -> None:
        world, start = dist.distributed_c10d._world, threading.Thread.start
        multithreading, torch_threads = torch._C._is_multithreading_enabled(), torch.get_num_threads()
        for _ in range(10):
            run_threads(gradient, 2)
        run_ranks(gradient, 2)
        assert dist.distributed_c10d._world is world
        assert threading.Thread.start is start
        assert torch._C._is_multithreading_enabled() == multithreading
        assert torch.get_num_threads() == torch_threads
        assert not dist.is_initialized()


@BOTH
def test_ddp_averages(run: Any) -> None:
    for result in run(gradient, 2):
        assert torch.equal(result, torch.full((1, 4), 1.5))


@pytest.mark.parametrize("case", CASES, ids=str)
@BOTH
def test_every_model_has_several_buckets(run: Any, case: Case) -> None:
    for seen, said in run(buckets_of, 2, case):
        assert len(seen[-1]) >= MIN_BUCKETS
        assert sorted(said) == sorted(seen[-1])


def test_weights_and_data_depend_on_their_arguments_alone() -> None:
    for case in CASES:
        torch.manual_seed(1)
        first, batch = case.model(), case.batch(2, 1)
        torch.manual_seed(2)
        assert_parity(case.model().state_dict(), first.state_dict(), what="weights")
        assert_parity(case.batch(2, 1), batch, what="data")
        with pytest.raises(AssertionError):
            assert_parity(case.model(seed=1).state_dict(), first.state_dict(), what="weights")
        with pytest.raises(AssertionError):
            assert_parity(case.batch(2, 0), batch, what="data")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_and_threads_train_alike(case: Case) -> None:
    processes = run_ranks(trained, 2, case)
    threads = run_threads(trained, 2, case)
    assert_parity(threads, processes, what="records")
    first, last = processes[0][0], processes[0][-1]
    assert last.step == 3
    assert last.optimizer["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.9**4)
    with pytest.raises(AssertionError, match="parameters"):
        assert_parity(replace(last, step=0, loss=first.loss.clone()), first, what="the first and last step")


def test_a_forgotten_zero_grad_shows() -> None:
    with pytest.raises(AssertionError, match=r"\[0\]\[1\] \(step 1\)\.parameters"):
        assert_parity(
            run_threads(lambda *args: trained(*args, step_fn=overlapped_step), 2, MLP),
            run_threads(trained, 2, MLP),
            what="training",
        )


def test_an_unused_branch_gets_its_gradient_from_the_other_rank() -> None:
    for records in run_threads(trained, 2, UNUSED_ON_SOME_RANKS):
        gradients = records[0].gradients
        assert gradients is not None
        assert gradients["branch.weight"] is not None
        assert gradients["branch.weight"].any()


class TestParity:
    def test_the_same_passes(self) -> None:
        value = {"a": [torch.tensor([1.0, float("nan")])], "b": (0.9, float("nan"), None, "x", True, 3)}
        assert_parity({**value, "a": [value["a"][0].clone()]}, value, what="values")

    @pytest.mark.parametrize(
        ("candidate", "reference", "message"),
        [
            (
                [torch.ones(2), torch.tensor([1.0, 2.5])],
                [torch.ones(2), torch.tensor([1.0, 2.0])],
                "[1]: max abs ",
            ),
            (torch.tensor([1.0]), torch.tensor([float("nan")]), "max abs difference"),
            (torch.tensor([float("inf")]), torch.tensor([1.0]), "max abs difference inf"),
            (torch.tensor([1]), torch.tensor([2]), "max abs difference 1"),
            (torch.tensor([True]), torch.tensor([False]), "1 of 1 differ"),
            (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype torch.float32 against torch.float64"),
            (torch.ones(2), torch.ones(1, 2), "shape (2,) against (1, 2)"),
            (torch.ones(1), 1.0, "Tensor against float"),
            ({"a": 1}, {"a": 1, "b": 2}, "lacks [\"'b'\"] and adds []"),
            ({"a": 1, "c": 2}, {"a": 1}, "lacks [] and adds [\"'c'\"]"),
            ([1, 2], [1], "length 2 against 1"),
            ([1], {"a": 1}, "list against dict"),
            ({"a": {"b": 1.5}}, {"a": {"b": 1.0}}, "['a']['b']: 1.5 against 1.0, difference 0.5"),
            (1, 1.0, "int against float"),
            ("x", "y", "'x' against 'y'"),
            ({"a": None}, {"a": torch.ones(1)}, "NoneType against Tensor"),
        ],
    )
    def test_a_difference_is_named(self, candidate: Any, reference: Any, message: str) -> None:
        with pytest.raises(AssertionError) as caught:
            assert_parity(candidate, reference, what="the answer")
        assert str(caught.value).startswith("the answer should be exactly equal")
        assert message in str(caught.value)

    def test_the_largest_difference_of_the_first_tensor_and_the_count_of_others(self) -> None:
        candidate = {"a": torch.tensor([1.0, 2.5, 0.0]), "b": torch.ones(1)}
        reference = {"a": torch.tensor([1.25, 2.0, 0.0]), "b": torch.zeros(1)}
        with pytest.raises(AssertionError) as caught:
            assert_parity(candidate, reference, what="w")
        assert "['a']: max abs difference 0.5, 2 of 3 elements, first at (0,): 1.0 against 1.25" in str(caught.value)
        assert "(1 more differ)" in str(caught.value)

    def test_a_tolerance_holds_for_floats_alone(self) -> None:
        loose: Any = {"what": "w", "exact": False, "atol": 0.1, "reason": "another order of summation"}
        assert_parity(torch.tensor([1.05]), torch.tensor([1.0]), **loose)
        assert_parity([1.05], [1.0], **loose)
        with pytest.raises(AssertionError, match="another order of summation"):
            assert_parity(torch.tensor([1.2]), torch.tensor([1.0]), **loose)
        with pytest.raises(AssertionError):
            assert_parity([1.2], [1.0], **loose)
        with pytest.raises(AssertionError):
            assert_parity(torch.tensor([2]), torch.tensor([1]), **{**loose, "atol": 5})
        for wrong in (float("nan"), 1.0):
            with pytest.raises(AssertionError):
                assert_parity(torch.tensor([wrong]), torch.tensor([float("inf")]), **{**loose, "rtol": 1.0})

    @pytest.mark.parametrize(
        "options",
        [
            {"exact": False, "atol": 0.1},
            {"atol": 0.1},
            {"rtol": 0.1, "reason": "r"},
        ],
    )
    def test_a_tolerance_needs_its_reason(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="reason"):
            assert_parity(torch.ones(1), torch.zeros(1), what="w", **options)

    def test_a_tolerance_of_nothing_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="above 0"):
            assert_parity(torch.ones(1), torch.zeros(1), what="w", exact=False, reason="r")

    @pytest.mark.parametrize("nothing", [{}, [], [{}], torch.ones(0)])
    def test_nothing_to_compare_is_an_error(self, nothing: Any) -> None:
        with pytest.raises(ValueError, match="nothing to compare"):
            assert_parity(nothing, nothing, what="w")

    def test_a_tensor_beside_itself_is_an_error(self) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="compared with itself"):
            assert_parity(model.state_dict(), model.state_dict(), what="w")


def test_bucket_calls_lists_and_lets_go() -> None:
    class Stage:
        async def __call__(self, bucket: Any) -> None: ...

    class Bucket:
        index = 4

    original = Stage.__call__
    with bucket_calls(Stage) as calls:
        coroutine = Stage()(Bucket())
        with pytest.raises(StopIteration):
            coroutine.send(None)
    assert calls == [4]
    assert Stage.__call__ is original
