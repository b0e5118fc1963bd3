"""What goes wrong under Join is named on every rank, and never waited for without end."""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from join_loops import BATCHES, WAYS, joined, overlapped_body
from torch import nn

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Join,
    OverlappedOptimizer,
    PeerError,
    Step,
    TrainingLoopError,
    UnsupportedError,
    chain,
)
from overlap.join.replay import SKEW_TO_WARN_OF

_TIMEOUT_S = 6


class Loader:
    """Says that it has so many batches, and has others."""

    def __init__(self, said: int, has: int, rank: int) -> None:
        self.said, self.has, self.rank = said, has, rank

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Any:
        return (MLP.batch(step, self.rank) for step in range(self.has))


def _model(*, registered: bool) -> tuple[Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    if registered:
        chain(AllReduce(), Step(optimizer)).register(ddp)
    return ddp, optimizer


def _said_wrong(rank: int, world_size: int, said: int, has: int, way: str) -> str:
    """Rank 1 has other than it said, rank 0 what it said, and more or fewer than rank 1."""
    ddp, optimizer = _model(registered=True)
    loader = Loader(said, has, rank) if rank == 1 else Loader(4, 4, rank)
    options = {"lengths": len(loader)} if way == "lengths" else {}
    with Join([ddp, optimizer], **options) as join:
        for batch in join.iterate(loader) if way == "loader" else loader:
            overlapped_body(ddp, optimizer, batch, 1.0)
    return "no error"


@pytest.mark.parametrize("way", ["lengths", "loader"])
@pytest.mark.parametrize(("said", "has"), [(4, 6), (2, 3), (4, 2), (6, 5)])
def test_other_than_said_is_named_on_every_rank(said: int, has: int, way: str) -> None:
    start_s = time.monotonic()
    waiting, wrong = run_ranks(
        _said_wrong, 2, said, has, way, group_timeout_s=_TIMEOUT_S, return_exceptions=True, timeout_s=40
    )
    assert isinstance(wrong, TrainingLoopError)
    assert "rank 1" in str(wrong) and str(said) in str(wrong)
    assert isinstance(waiting, PeerError)
    assert "rank 1" in str(waiting)
    assert time.monotonic() - start_s < 4 * _TIMEOUT_S


def _fails(rank: int, world_size: int, way: str, registered: bool) -> Any:
    """Rank 1 raises in its third iteration; rank 2 has left by then."""
    ddp, optimizer = _model(registered=registered)
    start_s = time.monotonic()
    try:
        batches = [MLP.batch(step, rank) for step in range((6, 5, 1)[rank])]
        with joined([ddp], batches, way) as iterated:
            for number, batch in enumerate(iterated):
                if rank == 1 and number == 2:
                    start_s = time.monotonic()
                    raise ValueError("the dog ate it")
                overlapped_body(ddp, optimizer, batch, 1.0)
    except Exception as error:
        return error, time.monotonic() - start_s
    return None


@pytest.mark.parametrize(("way", "registered"), [("loader", True), ("stream", True), ("forwards", False)])
def test_an_exception_on_one_rank_is_named_on_the_others(way: str, registered: bool) -> None:
    results = run_ranks(_fails, 3, way, registered, group_timeout_s=_TIMEOUT_S, timeout_s=40)
    error, took_s = results[1]
    assert isinstance(error, ValueError) and took_s < 1
    for rank in (0, 2):
        error, took_s = results[rank]
        assert isinstance(error, PeerError), error
        assert "rank 1" in str(error) and "the dog ate it" in str(error)


def _ends(rank: int, world_size: int) -> None:
    for way in WAYS:
        ddp, optimizer = _model(registered=True)
        batches = [MLP.batch(step, rank) for step in range((5, 3)[rank])]
        if way in ("loader", "stream"):
            with joined([ddp, optimizer], batches, way, on_exhausted="stop") as iterated:
                ran = 0
                for batch in iterated:
                    overlapped_body(ddp, optimizer, batch, 1.0)
                    ran += 1
                # All ranks are in step here.
                with torch.no_grad():
                    ddp(*batches[0].inputs)
            assert ran == 3
        else:
            with (
                pytest.raises(ConfigurationError, match=r"join\.iterate"),
                joined([ddp], batches, way, on_exhausted="stop"),
            ):
                overlapped_body(ddp, optimizer, batches[0], 1.0)
        for options in ({"on_exhausted": "raise"}, {"throw_on_early_termination": True}):
            ddp, optimizer = _model(registered=True)
            thrown: list[Any] = []
            with pytest.raises(TrainingLoopError, match=r"ranks \[1\] exhausted all inputs.*across all ranks"):
                _throws(ddp, optimizer, batches, way, options, thrown)
            assert len(thrown) == 3
        ddp, optimizer = _model(registered=True)
        with joined([ddp, optimizer], batches[:3], way, on_exhausted="raise") as iterated:
            for batch in iterated:
                overlapped_body(ddp, optimizer, batch, 1.0)
    ddp, optimizer = _model(registered=False)
    with Join([ddp], enable=False) as join:
        for batch in join.iterate(batches[:2]):
            mean_squared_error(ddp, batch).backward()


def test_stop_raise_and_disabled() -> None:
    run_ranks(_ends, 2)


class _Summing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(total := x.detach().clone())
        return super().forward(total)


def _foreign_hook(state, bucket):  # without annotations: DDP compares them with types
    return torch.futures.Future()


def _iterates_twice(ddp: Any) -> None:
    with Join([ddp]) as join:
        list(join.iterate([]))
        list(join.iterate([]))


def _goes_on(ddp: Any, batch: Any) -> None:
    with Join([ddp]) as join:
        list(join.iterate([]))
        ddp(*batch.inputs)


def _steps_first(ddp: Any, batch: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer]):
        for _ in range(steps):
            optimizer.step()
            mean_squared_error(ddp, batch).backward()


def _breaks(ddp: Any, batch: Any) -> None:
    with Join([ddp]) as join:
        for each in join.iterate(iter([batch] * 3)):
            mean_squared_error(ddp, each).backward()
            break


def _throws(ddp: Any, optimizer: Any, batches: Any, way: str, options: Any, ran: list[Any]) -> None:
    with joined([ddp, optimizer], batches, way, **options) as iterated:
        for batch in iterated:
            overlapped_body(ddp, optimizer, batch, 1.0)
            ran.append(batch)


def _refused(rank: int, world_size: int) -> None:
    batch = MLP.batch(0, rank)
    synced = wrap(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
    synced.module[1] = nn.SyncBatchNorm(16)
    with pytest.raises(UnsupportedError, match=r'1 is a SyncBatchNorm.*on_exhausted="stop"'):
        Join([synced])
    Join([synced], on_exhausted="stop")
    Join([synced], enable=False)

    summing = wrap(_Summing(16, 16))
    with (
        pytest.raises(UnsupportedError, match=r'collectives of its own in forward.*on_exhausted="stop"'),
        Join([summing]),
    ):
        summing(*batch.inputs)
    with Join([summing], on_exhausted="stop") as join:
        for each in join.iterate([batch] * (2 + rank)):
            mean_squared_error(summing, each).backward()

    hooked = wrap(MLP.model(), **MLP.ddp_options())
    hooked.register_comm_hook(None, _foreign_hook)
    with (
        pytest.raises(UnsupportedError, match="_foreign_hook divides by the number of all ranks"),
        Join([hooked], divide_by_initial_world_size=False),
    ):
        pass

    ddp, _ = _model(registered=False)
    with pytest.raises(ConfigurationError, match="at least one joinable"):
        Join([])
    with pytest.raises(ConfigurationError, match="Linear is not a Joinable"):
        Join([ddp.module[0]])
    with pytest.raises(ConfigurationError, match="joinable with a process group"):
        Join([torch.optim.SGD(ddp.parameters(), lr=0.1)])
    with pytest.raises(ConfigurationError, match=r"lengths is this rank's number of iterations.*-1"):
        Join([ddp], lengths=-1)
    with pytest.raises(ConfigurationError, match="on_exhausted is one of shadow, stop, raise, got 'wait'"):
        Join([ddp], on_exhausted="wait")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="throw_on_early_termination"):
        Join([ddp], throw_on_early_termination=True, on_exhausted="stop")
    with pytest.raises(ConfigurationError, match="leave lengths out"):
        Join([ddp], lengths=3, weight_by_samples=True)
    other = wrap(MLP.model(), process_group=torch.distributed.new_group([0, 1]), **MLP.ddp_options())
    with pytest.raises(ConfigurationError, match="several process groups"):
        Join([ddp, other])
    with pytest.raises(TrainingLoopError, match="inside of the block"):
        next(iter(Join([ddp]).iterate([1])))
    with (
        pytest.raises(TrainingLoopError, match="already active on this process group"),
        Join([ddp], lengths=0),
        Join([other], lengths=0),
        Join([ddp]),
    ):
        pass
    with pytest.raises(TrainingLoopError, match="open another"):
        _iterates_twice(ddp)
    with pytest.raises(TrainingLoopError, match=r"after join\.iterate had ended"):
        _goes_on(ddp, batch)
    with pytest.raises(TrainingLoopError, match=r"ranks \[1\] ran out of inputs, and the others did something more"):
        _steps_first(ddp, batch, 2 - rank)
    with pytest.raises(TrainingLoopError, match=r"left join\.iterate\(loader\) after 1 batches"):
        _breaks(ddp, batch)
    with (
        pytest.raises(ConfigurationError, match="rank 1 enters Join with"),
        Join([ddp], on_exhausted=("shadow", "raise")[rank]),  # type: ignore[arg-type]
    ):
        pass
    with (
        mock.patch("overlap.join.ddp.missing_names", return_value=["_gone"]),
        pytest.raises(UnsupportedError, match=r"lacks _gone.*torch\.distributed\.algorithms\.join\.Join"),
    ):
        Join([ddp])
    # After all of that the model trains as ever.
    with Join([ddp]) as join:
        for each in join.iterate([batch] * (2 + rank)):
            mean_squared_error(ddp, each).backward()


def test_what_cannot_work_is_refused() -> None:
    run_ranks(_refused, 2)


def _skewed(rank: int, world_size: int) -> list[str]:
    ddp, optimizer = _model(registered=True)
    batches = [MLP.batch(0, rank)] * (60 if rank == 0 else 3)
    skew = mock.patch("overlap.join.replay.SKEW_TO_WARN_OF", 50)
    with skew, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with joined([ddp, optimizer], batches, "loader") as iterated:
            for batch in iterated:
                overlapped_body(ddp, optimizer, batch, 1.0)
    return [str(each.message) for each in caught]


def test_a_large_skew_is_warned_of() -> None:
    active, left = run_ranks(_skewed, 2)
    assert not active and SKEW_TO_WARN_OF == 1000
    assert len(left) == 1
    assert "rank 1 ran out after 3 iterations and has replayed 50" in left[0]


def test_batches_differ() -> None:
    assert len(set(BATCHES)) == len(BATCHES), "or the loops of these tests would not be uneven"
