"""What cannot work under Join is refused, with the value and the remedy, and leaves the model as it was."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from join_loops import make
from torch import nn

from harness import on_ranks, wrap
from harness.models import MLP, mean_squared_error
from harness.third_party import DelegatingOptimizer
from overlap import AllReduce, ConfigurationError, Join, PeerError, TrainingLoopError, UnsupportedError, chain

_BATCH = MLP.batch(0, 0)


def _model(**options: Any) -> Any:
    return wrap(MLP.model(), **MLP.ddp_options(), **options)


def _on_another_group() -> Any:
    return _model(process_group=torch.distributed.new_group([0, 1]))


class _Summing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(total := x.detach().clone())
        return super().forward(total)


def _sync_batch_norm() -> Any:
    synced = wrap(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    synced.module[1] = nn.SyncBatchNorm(16)
    return synced


# Arguments and models that cannot be joined.

ARGUMENTS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda ddp: Join([]), "The join context manager requires at least one joinable"),
    (lambda ddp: Join([ddp.module[0]]), "Linear is not a DistributedDataParallel model; wrap it first"),
    (lambda ddp: Join([torch.optim.SGD(ddp.parameters(), lr=0.1)]), "joinable with a process group"),
    (
        lambda ddp: Join([ddp], on_exhausted="wait"),  # type: ignore[arg-type]
        "on_exhausted is one of shadow, stop, got 'wait'",
    ),
    (
        lambda ddp: Join([ddp, torch.optim.SGD([*ddp.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)]),
        r"SGD has a parameter of shape \(3,\) that no model in this Join synchronizes",
    ),
    (
        lambda ddp: Join([ddp, DelegatingOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))]),
        "DelegatingOptimizer runs no step hooks",
    ),
]


def _foreign_hook(state, bucket):  # without annotations: DDP compares them with types
    return torch.futures.Future()


@on_ranks(2)
def test_what_cannot_be_joined_is_refused_and_models_only_where_they_are_replayed(rank: int, world_size: int) -> None:
    for build, message in ARGUMENTS:
        with pytest.raises((ConfigurationError, UnsupportedError), match=message):
            build(_model())
    with pytest.raises(UnsupportedError, match=r'1 is a SyncBatchNorm.*on_exhausted="stop"'):
        Join([_sync_batch_norm()])
    for options in ({"on_exhausted": "stop"}, {"enable": False}):
        Join([_sync_batch_norm()], **options)
    summing = wrap(_Summing(16, 16))
    with (
        pytest.raises(UnsupportedError, match=r'collectives of its own in forward.*on_exhausted="stop"'),
        Join([summing]),
    ):
        summing(*_BATCH.inputs)
    with Join([summing], on_exhausted="stop") as join:
        for each in join.iterate([_BATCH] * (2 + rank)):
            mean_squared_error(summing, each).backward()
    hooked = _model()
    hooked.register_comm_hook(None, _foreign_hook)
    with (
        pytest.raises(UnsupportedError, match="_foreign_hook divides by the number of all ranks"),
        Join([hooked], divide_by_initial_world_size=False),
    ):
        pass
    with pytest.raises(ConfigurationError, match="multiple process groups: give each group a Join"):
        Join([_model(), _on_another_group()])


# Loops and blocks. After each of them the model trains as ever.


def _nested(ddp: Any, rank: int) -> None:
    with Join([ddp]), Join([_on_another_group()]), Join([ddp]):
        pass


def _iterates_outside(ddp: Any, rank: int) -> None:
    next(iter(Join([ddp]).iterate([1])))


def _iterates_twice(ddp: Any, rank: int) -> None:
    with Join([ddp]) as join:
        list(join.iterate([]))
        list(join.iterate([]))


def _goes_on(ddp: Any, rank: int) -> None:
    with Join([ddp]) as join:
        list(join.iterate([]))
        ddp(*_BATCH.inputs)


def _steps_first(ddp: Any, rank: int) -> None:
    optimizer = make(ddp, "plain", lr=0.1)
    with Join([ddp, optimizer]):
        for _ in range(2 - rank):
            optimizer.step()
            mean_squared_error(ddp, _BATCH).backward()


def _breaks(ddp: Any, rank: int) -> None:
    with Join([ddp]) as join:
        for each in join.iterate(iter([_BATCH] * 3)):
            mean_squared_error(ddp, each).backward()
            break


def _accumulates_to_the_last(ddp: Any, rank: int, **options: Any) -> None:
    """As many loops do it: rank 0 synchronizes at its last batch, in which rank 1 still accumulates."""
    count = 5 + 3 * rank
    with Join([ddp], **options) as join:
        for step, each in enumerate(join.iterate([_BATCH] * count)):
            with contextlib.nullcontext() if step % 2 or step + 1 == count else ddp.no_sync():
                mean_squared_error(ddp, each).backward()


def _accumulates_and_leaves(ddp: Any, rank: int) -> None:
    """Rank 1 synchronizes in the last iteration of rank 0, which only accumulates and has run out then."""
    with Join([ddp]):
        for step in range(2 + rank):
            with contextlib.nullcontext() if step == rank == 1 else ddp.no_sync():
                mean_squared_error(ddp, _BATCH).backward()


def _leaves_in_step(ddp: Any, rank: int) -> None:
    with Join([ddp], on_exhausted="stop") as join:
        for step, each in enumerate(join.iterate([_BATCH] * 4)):
            mean_squared_error(ddp, each).backward()
            if step == 1 and rank == 1:
                break


def _comes_again(ddp: Any, rank: int) -> None:
    join = Join([ddp])
    for _ in range(2):
        with join:
            pass


def _is_told_different_things(ddp: Any, rank: int) -> None:
    with Join([ddp], on_exhausted=("shadow", "stop")[rank]):  # type: ignore[arg-type]
        pass


LOOPS: list[tuple[Callable[[Any, int], None], type[Exception], str]] = [
    (_nested, TrainingLoopError, "already active on this process group"),
    (_iterates_outside, TrainingLoopError, "inside of the block"),
    (_iterates_twice, TrainingLoopError, "open another"),
    (_goes_on, TrainingLoopError, r"after join\.iterate had ended"),
    (_steps_first, TrainingLoopError, r"ranks \[1\] ran out of inputs, and the others did something more"),
    (_breaks, TrainingLoopError, r"left the loop .* after 1 batches, by break or return.*islice\(loader, 1\)"),
    (_accumulates_to_the_last, TrainingLoopError, r"ranks \[0\] synchronize .* ranks \[1\] do not .*nullcontext\(\)"),
    (
        partial(_accumulates_to_the_last, on_exhausted="stop"),
        TrainingLoopError,
        r"ranks \[0\] synchronize .* ranks \[1\] do not",
    ),
    (_accumulates_and_leaves, TrainingLoopError, r"ranks \[1\] synchronize .* ranks \[0\] do not"),
    (_leaves_in_step, TrainingLoopError, r"ranks \[1\] left the loop after 2 iterations, and ranks \[0\] went on"),
    (_comes_again, TrainingLoopError, "make another for the next epoch"),
    (_is_told_different_things, ConfigurationError, "rank 1 enters Join with"),
]


@on_ranks(2)
def test_blocks_that_cannot_be_followed_are_refused_and_leave_the_model_as_it_was(rank: int, world_size: int) -> None:
    for loop, error, message in LOOPS:
        ddp = _model()
        with pytest.raises(error, match=message):
            loop(ddp, rank)
        with Join([ddp]) as join:
            for each in join.iterate([_BATCH] * (2 + rank)):
                mean_squared_error(ddp, each).backward()


@on_ranks(3)
def test_ranks_that_make_different_calls_are_an_error(rank: int, world_size: int) -> None:
    """Rank 1 steps twice where rank 0 goes on, which rank 2 notices, without inputs."""
    ddp = _model()
    chain(AllReduce()).register(ddp)  # Ranks that wait learn of the error.
    optimizer = make(ddp, "plain", lr=0.1)
    refused = pytest.raises((TrainingLoopError, PeerError), match=r"different calls at the same time \(BEGIN, STEP\)")
    with refused, Join([ddp, optimizer]) as join:
        for step, each in enumerate(join.iterate([_BATCH] * (1 if rank == 2 else 3))):
            mean_squared_error(ddp, each).backward()
            for _ in range(1 + (step == rank == 1)):
                optimizer.step()


@on_ranks(2)
def test_a_deferred_update_that_ranks_without_inputs_cannot_follow(rank: int, world_size: int) -> None:
    for discards in (False, True):
        ddp = _on_another_group()
        optimizer = make(ddp, "deferred", lr=0.1, momentum=0.9)
        refused = pytest.raises(TrainingLoopError, match="under Join a backward cannot be discarded or added to")
        with refused, Join([ddp, optimizer]):
            for step in range(2 + 2 * rank):
                ddp(*MLP.batch(step, rank).inputs).sum().backward()
                if discards:
                    optimizer.zero_grad()
