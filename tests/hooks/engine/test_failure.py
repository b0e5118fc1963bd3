"""What fails is raised by backward with its place named, on every rank, and the model can be used again."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from harness import RankDied, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Bucket, CollectiveError, PeerError, Stage, UnsupportedError, as_stage, chain
from overlap.hooks import Role, send_recv

from ..failing import Flaky, backward, mean_gradients_are_right


def _raises_everywhere(rank: int, world_size: int, after: bool) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(Flaky(2, 1, after=after)).register(ddp)
    for step in range(5):
        if step != 2:
            mean_gradients_are_right(ddp, step, rank, is_exact=world_size == 2)
            continue
        with pytest.raises(ValueError, match="the dog ate it") as caught:
            backward(ddp, step, rank)
        (note,) = caught.value.__notes__
        assert "Flaky" in note and "bucket 1, step 2" in note and "bias" in note


@pytest.mark.parametrize("after", [False, True], ids=["before its collective", "after it"])
def test_a_stage_that_raises_makes_backward_raise_and_the_model_works_afterwards(after: bool) -> None:
    run_ranks(_raises_everywhere, 2, after)


def _raises_on_one_rank(rank: int, world_size: int, failing: int, after: bool) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(Flaky(2, 1, after=after, enabled=rank == failing)).register(ddp)
    for step in range(2):
        backward(ddp, step, rank)
    start_s = time.monotonic()
    if rank == failing:
        with pytest.raises(ValueError, match="the dog ate it"):
            backward(ddp, 2, rank)
    else:
        with pytest.raises(PeerError, match=f"rank {failing}: ValueError: the dog ate it .*Flaky.*bucket 1"):
            backward(ddp, 2, rank)
    assert time.monotonic() - start_s < 5, "not only when the group's timeout has passed"
    for step in range(3, 6):
        mean_gradients_are_right(ddp, step, rank, is_exact=world_size == 2)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("after", [False, True], ids=["before its collective", "after it"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_raises_alone_is_named_on_the_others(world_size: int, failing: int, after: bool) -> None:
    # Going on may take as long as the group's timeout: an operation in flight is not always ended sooner.
    run_ranks(_raises_on_one_rank, world_size, failing, after, group_timeout_s=6)


def _dies(rank: int, world_size: int) -> str:
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    class Deadly(AllReduce):
        async def __call__(self, bucket: Bucket) -> None:
            if (rank, bucket.step, bucket.index) == (1, 2, 1):
                os._exit(7)
            await super().__call__(bucket)

    chain(Deadly()).register(ddp)
    for step in range(2):
        backward(ddp, step, rank)
    start_s = time.monotonic()
    with pytest.raises(CollectiveError, match="no rank has reported an error") as caught:
        backward(ddp, 2, rank)
    assert time.monotonic() - start_s < 5
    return str(caught.value)


def test_a_killed_rank_is_an_error_on_the_others_and_no_hang() -> None:
    survivor, dead = run_ranks(_dies, 2, return_exceptions=True)
    assert isinstance(survivor, str) and isinstance(dead, RankDied)


def _hangs(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    for step in range(2):
        backward(ddp, step, rank)
    if rank == 1:
        time.sleep(8)  # Longer than the group's timeout of 4 s.
        return
    with pytest.raises(CollectiveError, match="no rank has reported an error"):
        backward(ddp, 2, rank)


def test_a_rank_that_does_not_come_is_an_error_when_the_groups_timeout_is_over() -> None:
    run_ranks(_hangs, 2, group_timeout_s=4)


def _other_stages(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    stage = AllReduce() if rank == 0 else Flaky(0, 0, after=True)
    with pytest.raises(CollectiveError, match=r"rank 1 registers .*Flaky.*rank 0 registers .*AllReduce"):
        chain(stage).register(ddp)


def test_ranks_that_register_different_stages_are_told() -> None:
    run_ranks(_other_stages, 2)


def _slow_messages(rank: int, world_size: int) -> None:
    """A message that takes longer than the worker's patience is waited for all the same."""

    class Exchange(Stage):
        async def __call__(self, bucket: Bucket) -> None:
            if rank == 1 and bucket.index == 0:
                time.sleep(2.5)
            other = torch.empty_like(bucket.buffer)
            await send_recv([(bucket.buffer, 1 - rank)], [(other, 1 - rank)])
            bucket.buffer.add_(other).mul_(1 / bucket.divisor)

    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(Exchange()).register(ddp)
    mean_gradients_are_right(ddp, 0, rank, is_exact=world_size == 2)


def test_slow_messages_are_waited_for() -> None:
    run_ranks(_slow_messages, 2)


def _sparse(rank: int, world_size: int) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    chain(AllReduce()).register(ddp)
    with pytest.raises(UnsupportedError, match="sparse=False") as caught:
        ddp(torch.tensor([1, 2])).sum().backward()
    assert "0.weight" in caught.value.__notes__[0]


def test_sparse_gradients_are_refused_by_name() -> None:
    run_ranks(_sparse, 2)


def _fails_by_value(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("kept as a value"))
    return future


def _fails_at_once(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    raise KeyError("raised at once")


def _returns_nothing(state: Any, bucket: Any) -> None:
    return None


def _hook_errors(rank: int, world_size: int, hook: Any, error: type[Exception], text: str) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(as_stage(hook)).register(ddp)
    for step in range(2):
        with pytest.raises(error, match=text):
            backward(ddp, step, rank)


@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        (_fails_by_value, KeyError, "kept"),
        (_fails_at_once, KeyError, "at once"),
        (_returns_nothing, ValueError, "Future"),
    ],
)
def test_an_error_of_a_foreign_hook_comes_through_in_every_pass(hook: Any, error: type[Exception], text: str) -> None:
    run_ranks(_hook_errors, 2, hook, error, text)


class _FailsBefore(AllReduce):
    """Fails as a pass begins."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps, self.begun = steps, -1

    def before_backward(self, *, is_replay: bool) -> None:
        self.begun += 1
        if self.begun in self.steps:
            raise ValueError("the dog ate it")


class _FailsIn(AllReduce):
    """Fails in the first bucket, before its collective."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.step in self.steps and bucket.index == 0:
            raise ValueError("the dog ate it")
        await super().__call__(bucket)


def _fails_repeatedly(rank: int, world_size: int, kind: type) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    # Another name on every rank would be told at registration.
    stage = kind((1, 2, 4) if rank == 0 else ())
    chain(stage).register(ddp)
    for step in range(6):
        if step not in (1, 2, 4):
            mean_gradients_are_right(ddp, step, rank, is_exact=world_size == 2)
            continue
        with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it") as caught:
            backward(ddp, step, rank)
        if rank == 0:
            assert kind.__name__ in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", [_FailsBefore, _FailsIn])
def test_a_rank_that_fails_again_and_again_is_heard_every_time(kind: type) -> None:
    run_ranks(_fails_repeatedly, 2, kind, group_timeout_s=8)


def _does_not_come(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"could not connect .*ranks \[1\] did not come to register a chain"):
            chain(AllReduce()).register(ddp)


def test_a_rank_that_does_not_register_is_named() -> None:
    run_ranks(_does_not_come, 2, group_timeout_s=2)


class _Counts(Stage):
    """Counts how often it is told that a backward is over."""

    role = Role.AVERAGER
    told = 0

    async def __call__(self, bucket: Bucket) -> None:
        pass

    def after_backward(self, *, failed: bool) -> None:
        self.told += 1


class _RaisesLate(Flaky):
    """A reducer that raises when all is done."""

    told = 0

    def after_backward(self, *, failed: bool) -> None:
        self.told += 1
        if self.told == 2:
            raise ValueError("the dog ate it")


def _raises_at_the_end(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    counts = _Counts()
    chain(_RaisesLate(-1, 0, after=False), counts).register(ddp)
    for step in range(3):
        if step != 1:
            mean_gradients_are_right(ddp, step, rank, is_exact=world_size == 2)
            continue
        with pytest.raises(ValueError, match="the dog ate it"):
            backward(ddp, step, rank)
    assert counts.told == 3


def test_every_stage_is_told_that_backward_is_over_even_if_one_raises_then() -> None:
    run_ranks(_raises_at_the_end, 2)
