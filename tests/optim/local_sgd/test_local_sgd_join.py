"""Local SGD on uneven inputs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import Values, assign, sgd, values_of
from torch.distributed.algorithms.join import Join

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import OverlappedOptimizer, Step, TrainingLoopError, UnsupportedError
from overlap.optim.local_sgd import LocalSGD

BATCHES = (9, 4, 6)
OPTIONS: dict[str, Any] = {
    "alone": {},
    "overlapped": {"overlap": 1},
    "outer": {"outer": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)},
    "outer and fragments": {"outer": functools.partial(torch.optim.SGD, lr=0.7), "fragments": 2, "overlap": 1},
    "machine": {"subgroup": "machine"},
    "update in backward": {},
}
CASES = {"every parameter used": MLP, "unused on some ranks": UNUSED_ON_SOME_RANKS}


def _build(ddp: Any, form: str, period: int, start: int) -> LocalSGD:
    optimizer: Any = sgd(ddp.parameters())
    update = None
    if form == "update in backward":
        optimizer = OverlappedOptimizer(optimizer)
        update = Step(optimizer)
    return LocalSGD(ddp, optimizer, period, start, update=update, **OPTIONS[form])


def _train(case: Case, rank: int, ddp: Any, made: LocalSGD, steps: int, *, zero_grad: bool = True) -> None:
    for step in range(steps):
        if zero_grad:
            made.zero_grad()
        mean_squared_error(ddp, case.batch(step, rank)).backward()
        made.step()


def _train_unevenly(case: Case, rank: int, form: str, start: int, *, period: int = 3, kind: Any = Join) -> Any:
    ddp = wrap(case.model(), **case.ddp_options())
    made = _build(ddp, form, period, start)
    with kind([ddp, made]):
        _train(case, rank, ddp, made, BATCHES[rank], zero_grad=form != "update in backward")
    return ddp, made


def _ends(rank: int, world_size: int, case_name: str, form: str) -> None:
    case = CASES[case_name]
    for start in (0, 5):
        ddp, made = _train_unevenly(case, rank, form, start)
        what = f"{case}, {form}, from step {start}"
        assert made.step_count == max(BATCHES[:world_size]) and made.synchronizer.pending is None, what
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, values_of(ddp.module))
        for other in range(1, world_size):
            assert_parity(everyone[other], everyone[0], what=f"{what}: rank {other} at the end")
        assert "_sync_final_model" not in vars(ddp)
        _train(case, rank, ddp, made, 2)  # And on it goes, with all ranks.


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("case_name", "form"),
    [
        (case_name, form)
        for case_name in CASES
        for form in OPTIONS
        if (case_name, form) != ("unused on some ranks", "update in backward")  # Refused; see below.
    ],
)
def test_uneven_inputs_end_with_equal_parameters(case_name: str, form: str, world_size: int) -> None:
    run_ranks(_ends, world_size, case_name, form)


def _update_and_unused(rank: int, world_size: int) -> None:
    ddp = wrap(UNUSED_ON_SOME_RANKS.model(), **UNUSED_ON_SOME_RANKS.ddp_options())
    with pytest.raises(UnsupportedError, match="leave update out"):
        _build(ddp, "update in backward", 3, 0)


def test_an_update_in_backward_is_refused_with_unused_parameters() -> None:
    run_ranks(_update_and_unused, 2)


def _joined_update(rank: int, world_size: int) -> None:
    # Rank 1 runs out of inputs after the first step of the second round.
    (alone, _), (updated, _) = (
        _train_unevenly(MLP, rank, form, 0, period=3) for form in ("alone", "update in backward")
    )
    assert_parity(values_of(updated.module), values_of(alone.module), what="updated in backward")


def test_a_rank_without_inputs_makes_no_update_of_its_own() -> None:
    run_ranks(_joined_update, 2)


def _weighted(rank: int, world_size: int) -> Values:
    """All ranks' training, on each of them: rank 0 makes 9 steps, rank 1 4 and rank 2 6."""
    models = [MLP.model() for _ in range(world_size)]
    optimizers = [sgd(model.parameters()) for model in models]
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        made_steps = [max(0, min(end, BATCHES[other]) - begin) for other in range(world_size)]
        for other, model in enumerate(models):
            for step in range(begin, begin + made_steps[other]):
                optimizers[other].zero_grad()
                mean_squared_error(model, MLP.batch(step, other)).backward()
                optimizers[other].step()
        values = [values_of(model) for model in models]
        mean = {
            name: sum(steps * v[name] for steps, v in zip(made_steps, values, strict=True)) / sum(made_steps)
            for name in values[0]
        }
        for model in models:
            assign(model, mean)  # type: ignore[arg-type]
    return values_of(models[0])


def _weights(rank: int, world_size: int) -> None:
    expected = _weighted(rank, world_size)
    for kind in (Join, overlap.Join):
        ddp, _ = _train_unevenly(MLP, rank, "alone", 0, period=4, kind=kind)
        assert_parity(
            values_of(ddp.module), expected, what=kind.__module__, exact=False, rtol=1e-4, atol=1e-6,
            reason="Gloo adds three and more in another order",
        )  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_counts_for_the_steps_that_it_made_in_the_round(world_size: int) -> None:
    run_ranks(_weights, world_size)


def _left_out(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    made = LocalSGD(ddp, sgd(ddp.parameters()), 2, 2)
    match = r"Join\(\[ddp, local\]\)" if rank == 1 else "rank 1"
    error: Any = TrainingLoopError if rank == 1 else Exception

    def uneven() -> None:
        with Join([ddp]):
            _train(MLP, rank, ddp, made, 2 - rank)

    with pytest.raises(error, match=match):
        uneven()


def test_a_join_without_local_sgd_is_refused() -> None:
    run_ranks(_left_out, 2, group_timeout_s=6)
