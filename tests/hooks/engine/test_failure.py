"""What fails is raised by backward with its place named, on every rank, and the model can be used again."""

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import RankDied, on_ranks, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Bucket, CollectiveError, PeerError, Stage, UnsupportedError, as_stage, chain
from overlap.hooks import Role
from overlap.hooks.reducers import OnGroup
from overlap.ranks.board import Board


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp.zero_grad()
    ddp(*MLP.batch(step, rank).inputs).square().sum().backward()


def _assert_mean_gradients(ddp: Any, step: int, rank: int) -> None:
    """Beside a new plain DDP, whose buckets are cut differently: sums of three are taken in another order."""
    reference = wrap(ddp.module, **MLP.ddp_options())
    _backward(reference, step, rank)
    for ours, plain in zip(ddp.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-5)


def _dies(rank: int, world_size: int) -> str:
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    class Deadly(AllReduce):
        async def __call__(self, bucket: Bucket) -> None:
            if (rank, bucket.step, bucket.index) == (1, 2, 1):
                os._exit(7)
            await super().__call__(bucket)

    chain(Deadly()).register(ddp)
    for step in range(2):
        _backward(ddp, step, rank)
    start_s = time.monotonic()
    with pytest.raises(CollectiveError, match="no rank has reported an error") as caught:
        _backward(ddp, 2, rank)
    assert time.monotonic() - start_s < 5
    return str(caught.value)


def test_a_killed_rank_is_an_error_on_the_others_and_no_hang() -> None:
    survivor, dead = run_ranks(_dies, 2, return_exceptions=True)
    assert isinstance(survivor, str) and isinstance(dead, RankDied)


@on_ranks(2, group_timeout_s=2)
def test_a_rank_that_does_not_come_is_an_error_when_the_groups_timeout_is_over(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    for step in range(2):
        _backward(ddp, step, rank)
    if rank == 1:
        time.sleep(3)  # Longer than the group's timeout of 2 s.
        return
    with pytest.raises(CollectiveError, match="no rank has reported an error"):
        _backward(ddp, 2, rank)


@on_ranks(2, group_timeout_s=2)
def test_a_rank_that_does_not_register_is_named(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"could not connect .*ranks \[1\] did not come to register a chain"):
            chain(AllReduce()).register(ddp)


FAILING = (1, 2, 4)


class _Fails(AllReduce):
    """Fails in the steps ``FAILING``: before the first bucket, in it, or after a collective of the second."""

    def __init__(self, where: str, *, enabled: bool) -> None:
        self.where, self.enabled = where, enabled
        self.step = -1

    def fail(self, where: str) -> None:
        if self.enabled and self.step in FAILING and where == self.where:
            raise ValueError("the dog ate it")

    def before_backward(self, *, is_replay: bool) -> None:
        self.step += 1
        self.fail("before")

    async def __call__(self, bucket: Bucket) -> None:
        self.fail(f"in {bucket.index}")
        await super().__call__(bucket)
        self.fail(f"after {bucket.index}")


class _Counts(Stage):
    """Counts how often it is notified that a backward is over."""

    role = Role.AVERAGER
    count = 0

    async def __call__(self, bucket: Bucket) -> None:
        pass

    def after_backward(self, *, failed: bool) -> None:
        self.count += 1


# On connections that are closed in the middle of a message Gloo wakes nobody: ranks give up after the 5 s of an abort.
@on_ranks(3, group_timeout_s=20, timeout_s=120)
def test_a_rank_that_fails_again_and_again_is_named_on_the_others_every_time_and_the_model_works(rank: int) -> None:
    for where, is_everywhere in (("before", False), ("in 0", False), ("after 1", False), ("in 0", True)):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        stage, counts = _Fails(where, enabled=is_everywhere or rank == 0), _Counts()
        chain(stage, counts).register(ddp)
        for step in range(6):
            if step not in FAILING:
                _backward(ddp, step, rank)
                _assert_mean_gradients(ddp, step, rank)
                continue
            start_s = time.monotonic()
            if stage.enabled:
                with pytest.raises(ValueError, match="the dog ate it") as caught:
                    _backward(ddp, step, rank)
                assert "_Fails()" in caught.value.__notes__[0]
            else:
                with pytest.raises(PeerError, match=r"rank 0: ValueError: the dog ate it .*_Fails"):
                    _backward(ddp, step, rank)
            assert time.monotonic() - start_s < 10, "not only when the group's timeout has passed"
        assert counts.count == 6, "every stage is notified that backward is over"


# The forward in which DDP compares its buckets between ranks: their models come in one order there.
_COMPARING = 1


def _noting_connections(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released each time that connections begin to be made."""
    begun = threading.Semaphore(0)
    connect = Board.connect

    def noted(*args: Any, **options: Any) -> Any:
        begun.release()
        return connect(*args, **options)

    monkeypatch.setattr(Board, "connect", noted)
    return begun


def _step(ddps: list[Any], step: int, rank: int, before_the_first: Callable[[], object]) -> None:
    """One backward of all models, of which that of the last begins first."""
    for ddp in ddps:
        ddp.zero_grad()
    outputs = [ddp(*MLP.batch(step, rank).inputs) for ddp in ddps]

    def hook(gradient: torch.Tensor) -> None:
        before_the_first()

    outputs[0].register_hook(hook)
    sum(output.square().sum() for output in outputs).backward()


@on_ranks(2, group_timeout_s=15)
def test_two_models_that_connect_in_other_orders_are_not_mixed_up(rank: int, world_size: int) -> None:
    group = dist.new_group(range(world_size))
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = _noting_connections(monkeypatch)
        models = [wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1)]
        counts = [_Counts() for _ in models]
        for ddp, count in zip(models, counts, strict=True):
            chain(OnGroup(_Fails("in 0", enabled=rank == 0), group), count).register(ddp)
        for step in range(6):
            in_order = models if rank == 0 or step == _COMPARING else models[::-1]
            while begun.acquire(blocking=False):
                pass
            connects = step - 1 in FAILING or step == 0

            def wait(connects: bool = connects) -> None:
                assert not connects or begun.acquire(timeout=30)

            if step in FAILING:
                with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it"):
                    _step(in_order, step, rank, wait)
                continue
            _step(in_order, step, rank, wait)
            for ddp in models:
                _assert_mean_gradients(ddp, step, rank)
        assert [each.count for each in counts] == [6, 6], "though backward can raise one error only"


def _fails_by_value(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("kept as a value"))
    return future


def _fails_at_once(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    raise KeyError("raised at once")


def _returns_nothing(state: Any, bucket: Any) -> None:
    return None


def _hook_errors(rank: int) -> None:
    for hook, error in ((_fails_by_value, KeyError), (_fails_at_once, KeyError), (_returns_nothing, ValueError)):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        chain(as_stage(hook)).register(ddp)
        for step in range(2):
            with pytest.raises(error, match=r"kept as a value|raised at once|Future"):
                _backward(ddp, step, rank)


def _sparse(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 4))
    ddp = DistributedDataParallel(model)
    chain(AllReduce()).register(ddp)
    with pytest.raises(UnsupportedError, match="sparse=False") as caught:
        ddp(torch.tensor([1, 2])).sum().backward()
    assert "0.weight" in caught.value.__notes__[0]


@on_ranks(2)
def test_an_error_of_a_foreign_hook_comes_through_and_sparse_gradients_are_refused_by_name(rank: int) -> None:
    _hook_errors(rank)
    _sparse(rank)


class _Normalized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


@on_ranks(2)
def test_a_connection_that_is_lost_in_ddps_own_collectives_gets_a_note(rank: int, world_size: int) -> None:
    group = dist.new_group()
    ddp = DistributedDataParallel(_Normalized(), process_group=group)
    chain(AllReduce()).register(ddp)
    if rank == 0:  # DDP sends its buffers.
        del ddp
        gc.collect()
        dist.destroy_process_group(group)
        return
    with pytest.raises(RuntimeError, match="gloo") as raised:
        ddp(torch.ones(3, 4))
    assert any("no rank has reported an error" in note for note in raised.value.__notes__)
