"""What cannot work under Join is refused, with the value and the remedy, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Join,
    OverlappedOptimizer,
    Step,
    TrainingLoopError,
    UnsupportedError,
    chain,
)

_BATCH = MLP.batch(0, 0)


def _model() -> Any:
    return wrap(MLP.model(), **MLP.ddp_options())


class _Summing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(total := x.detach().clone())
        return super().forward(total)


def _sync_batch_norm() -> Any:
    synced = wrap(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    synced.module[1] = nn.SyncBatchNorm(16)
    return synced


# Models that cannot be joined.


def _refuses_sync_batch_norm(rank: int, world_size: int) -> None:
    with pytest.raises(UnsupportedError, match=r'1 is a SyncBatchNorm.*on_exhausted="stop"'):
        Join([_sync_batch_norm()])


def test_sync_batch_norm_is_refused() -> None:
    run_ranks(_refuses_sync_batch_norm, 2)


def _takes_sync_batch_norm(rank: int, world_size: int, options: dict[str, Any]) -> None:
    Join([_sync_batch_norm()], **options)


@pytest.mark.parametrize("options", [{"on_exhausted": "stop"}, {"enable": False}], ids=["stop", "disabled"])
def test_sync_batch_norm_is_taken_where_nothing_is_replayed(options: dict[str, Any]) -> None:
    run_ranks(_takes_sync_batch_norm, 2, options)


def _collectives_in_forward(rank: int, world_size: int) -> None:
    summing = wrap(_Summing(16, 16))
    with (
        pytest.raises(UnsupportedError, match=r'collectives of its own in forward.*on_exhausted="stop"'),
        Join([summing]),
    ):
        summing(*_BATCH.inputs)
    with Join([summing], on_exhausted="stop") as join:
        for each in join.iterate([_BATCH] * (2 + rank)):
            mean_squared_error(summing, each).backward()


def test_collectives_in_forward_are_refused_unless_ranks_stop_together() -> None:
    run_ranks(_collectives_in_forward, 2)


def _foreign_hook(state, bucket):  # without annotations: DDP compares them with types
    return torch.futures.Future()


def _dividing_hook(rank: int, world_size: int) -> None:
    hooked = _model()
    hooked.register_comm_hook(None, _foreign_hook)
    with (
        pytest.raises(UnsupportedError, match="_foreign_hook divides by the number of all ranks"),
        Join([hooked], divide_by_initial_world_size=False),
    ):
        pass


def test_dividing_by_active_ranks_is_refused_with_a_hook_that_divides_by_all() -> None:
    run_ranks(_dividing_hook, 2)


def _missing_names(rank: int, world_size: int) -> None:
    with (
        mock.patch("overlap.join.ddp.missing_names", return_value=["_gone"]),
        pytest.raises(UnsupportedError, match=r"lacks _gone.*torch\.distributed\.algorithms\.join\.Join"),
    ):
        Join([_model()])


def test_a_version_of_pytorch_without_the_names_that_join_needs_is_refused() -> None:
    run_ranks(_missing_names, 2)


# Arguments.

ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no joinable": (lambda ddp: Join([]), "The join context manager requires at least one joinable"),
    "a plain module": (
        lambda ddp: Join([ddp.module[0]]),
        "Linear is not a DistributedDataParallel model; wrap it first",
    ),
    "an optimizer alone": (
        lambda ddp: Join([torch.optim.SGD(ddp.parameters(), lr=0.1)]),
        "joinable with a process group",
    ),
    "negative lengths": (
        lambda ddp: Join([ddp], lengths=-1),
        r"lengths is this rank's number of iterations.*-1",
    ),
    "unknown on_exhausted": (
        lambda ddp: Join([ddp], on_exhausted="wait"),  # type: ignore[arg-type]
        "on_exhausted is one of shadow, stop, raise, got 'wait'",
    ),
    "both ways to raise": (
        lambda ddp: Join([ddp], throw_on_early_termination=True, on_exhausted="stop"),
        "throw_on_early_termination",
    ),
    "lengths and samples": (lambda ddp: Join([ddp], lengths=3, weight_by_samples=True), "leave lengths out"),
}


def _bad_argument(rank: int, world_size: int, name: str) -> None:
    make, message = ARGUMENTS[name]
    with pytest.raises(ConfigurationError, match=message):
        make(_model())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_out_of_range_are_refused(name: str) -> None:
    run_ranks(_bad_argument, 1, name)


# Loops and blocks. After each of them the model trains as ever.


def _on_another_group() -> Any:
    group = torch.distributed.new_group([0, 1])
    return wrap(MLP.model(), process_group=group, **MLP.ddp_options())


def _several_groups(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="multiple process groups: give each group a Join"):
        Join([_model(), _on_another_group()])


def test_several_process_groups_in_one_join_are_refused() -> None:
    run_ranks(_several_groups, 2)


def _nested(ddp: Any, rank: int) -> None:
    other = _on_another_group()
    with Join([ddp], lengths=0), Join([other], lengths=0), Join([ddp]):
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
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer]):
        for _ in range(2 - rank):
            optimizer.step()
            mean_squared_error(ddp, _BATCH).backward()


def _breaks(ddp: Any, rank: int) -> None:
    with Join([ddp]) as join:
        for each in join.iterate(iter([_BATCH] * 3)):
            mean_squared_error(ddp, each).backward()
            break


def _is_told_different_things(ddp: Any, rank: int) -> None:
    with Join([ddp], on_exhausted=("shadow", "raise")[rank]):  # type: ignore[arg-type]
        pass


def _is_refused(
    rank: int, world_size: int, loop: Callable[[Any, int], None], error: type[Exception], message: str
) -> None:
    ddp = _model()
    with pytest.raises(error, match=message):
        loop(ddp, rank)
    with Join([ddp]) as join:
        for each in join.iterate([_BATCH] * (2 + rank)):
            mean_squared_error(ddp, each).backward()


def test_a_second_join_on_the_same_group_is_refused() -> None:
    run_ranks(_is_refused, 2, _nested, TrainingLoopError, "already active on this process group")


def test_iterate_outside_of_the_block_is_refused() -> None:
    run_ranks(_is_refused, 2, _iterates_outside, TrainingLoopError, "inside of the block")


def test_iterate_twice_in_a_block_is_refused() -> None:
    run_ranks(_is_refused, 2, _iterates_twice, TrainingLoopError, "open another")


def test_a_forward_after_iterate_has_ended_is_refused() -> None:
    run_ranks(_is_refused, 2, _goes_on, TrainingLoopError, r"after join\.iterate had ended")


def test_a_step_before_the_forward_that_tells_who_has_inputs_is_refused() -> None:
    message = r"ranks \[1\] ran out of inputs, and the others did something more"
    run_ranks(_is_refused, 2, _steps_first, TrainingLoopError, message)


def test_leaving_iterate_early_is_refused() -> None:
    run_ranks(_is_refused, 2, _breaks, TrainingLoopError, r"left join\.iterate\(loader\) after 1 batches")


def test_ranks_that_were_told_different_things_are_refused() -> None:
    run_ranks(_is_refused, 2, _is_told_different_things, ConfigurationError, "rank 1 enters Join with")


def _deferred_loop_that_does_not_step(rank: int, world_size: int, loop: str) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    refused = pytest.raises(TrainingLoopError, match="under Join a backward cannot be discarded or added to")
    with refused, Join([ddp, optimizer]):
        for step in range(2 + 2 * rank):
            ddp(*MLP.batch(step, rank).inputs).sum().backward()
            if loop == "discards":
                optimizer.zero_grad()


@pytest.mark.parametrize("loop", ["adds up", "discards"])
def test_a_deferred_update_that_ranks_without_inputs_cannot_follow(loop: str) -> None:
    run_ranks(_deferred_loop_that_does_not_step, 2, loop)
