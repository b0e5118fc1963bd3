"""With known lengths an iteration is one forward, one backward and one step() of each joinable, or is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_loops import assert_same_on_every_rank, joined, snapshot, train_with_zero_loss

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case, mean_squared_error
from overlap import (
    AllReduce,
    Join,
    OverlappedOptimizer,
    PeerError,
    Step,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
)

_TIMEOUT_S = 20
_COUNTS = (4, 2, 0)


class _Loop:
    """A model with an update in backward, and what a loop may do with it beside the usual."""

    def __init__(self, rank: int, case: Case = MLP, *, rebuilds: bool = True) -> None:
        self.rank, self.case = rank, case
        # Where a rank raises in its first iteration, another one would wait for rebuilt buckets, in DDP's C++.
        options = {**case.ddp_options(), "find_unused_parameters": not rebuilds}
        self.ddp = wrap(case.model(), process_group=dist.new_group(), **options)
        self.optim = OverlappedOptimizer(torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9))
        chain(AllReduce(), Step(self.optim)).register(self.ddp)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optim, 1, 0.5)
        self.joinables = [self.ddp, self.optim]

    def train(self, batch: Any) -> None:
        mean_squared_error(self.ddp, batch).backward()
        self.optim.step()

    def accumulates(self, batch: Any) -> None:
        with self.ddp.no_sync():
            mean_squared_error(self.ddp, batch).backward()
        self.train(batch)

    def has_two_forwards(self, batch: Any) -> None:
        (self.ddp(*batch.inputs) + self.ddp(*batch.inputs)).square().mean().backward()
        self.optim.step()

    def has_no_step(self, batch: Any) -> None:
        mean_squared_error(self.ddp, batch).backward()

    def has_no_backward(self, batch: Any) -> None:
        mean_squared_error(self.ddp, batch)
        self.optim.step()

    def steps_twice(self, batch: Any) -> None:
        self.train(batch)
        self.optim.step()

    def evaluates(self, batch: Any) -> None:
        with torch.no_grad():
            self.ddp(*batch.inputs)
        self.train(batch)

    def sets_the_rate(self, batch: Any) -> None:
        self.optim.param_groups[0]["lr"] *= 0.9
        self.train(batch)

    def schedules(self, batch: Any) -> None:
        self.train(batch)
        self.scheduler.step()

    def schedules_first(self, batch: Any) -> None:
        self.scheduler.step()
        self.train(batch)

    def schedules_with_an_argument(self, batch: Any) -> None:
        self.train(batch)
        self.scheduler.step(3)  # type: ignore[arg-type]


# What a loop does, in which place of an iteration it is refused, and other joinables than [ddp, optim].
REFUSED: dict[str, tuple[Callable[[_Loop, Any], None], str, list[str]]] = {
    "accumulation": (_Loop.accumulates, r"has a forward of Dist\w+ under no_sync\(\) where a forward .* is due", []),
    "two forwards": (_Loop.has_two_forwards, r"has a forward of Dist\w+ where a backward of Dist\w+ is due", []),
    "no step": (_Loop.has_no_step, r"has its end where a step of OverlappedOptimizer is due", []),
    "no backward": (_Loop.has_no_backward, r"has a step of Over\w+ where a backward of Dist\w+ is due", []),
    "two steps": (_Loop.steps_twice, r"has a step of OverlappedOptimizer where its end is due", []),
    "evaluation": (_Loop.evaluates, r"under no_grad\(\) where a forward of Dist\w+ is due", []),
    "a rate by hand": (_Loop.sets_the_rate, r"lr of OverlappedOptimizer went from .*0\.1.* to .*0\.09", []),
    "a scheduler apart": (_Loop.schedules, r"lr of Over.*give every scheduler .*Join\(\[ddp, optimizer, sched", []),
    "another order": (_Loop.schedules, r"where a step of StepLR is due.*in the loop's order", ["scheduler"]),
    "a step first": (_Loop.schedules_first, r"has a step of StepLR where a forward of Dist", ["scheduler"]),
    "an argument": (_Loop.schedules_with_an_argument, r"StepLR\.step\(\) is given an argument", ["scheduler"]),
}


def _outcome(joinables: list[Any], batches: Any, body: Callable[[Any], None], **options: Any) -> str:
    """The error of a loop over ``batches``; by their length, or by ``lengths``."""
    try:
        with Join(joinables, **options) as join:
            for batch in batches if options else join.iterate(batches):
                body(batch)
    except (UnsupportedError, TrainingLoopError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _refused(rank: int, world_size: int) -> dict[str, str]:
    """Every rank with inputs raises in its first iteration; the one without learns of it."""
    found = {}
    for name, (body, _, more) in REFUSED.items():
        loop = _Loop(rank, BATCH_NORM if name == "evaluation" else MLP, rebuilds=False)
        others = [getattr(loop, each) for each in more]
        loop.joinables[1:] = [*others, loop.optim] if name == "another order" else [loop.optim, *others]
        ran, start_s = 0, time.monotonic()

        def counted(batch: Any, body: Any = body, loop: _Loop = loop) -> None:
            nonlocal ran
            ran += 1
            body(loop, batch)

        # Where there are buffers, a rank without a batch would wait for them in DDP's C++.
        steps = max(_COUNTS[rank], 1 if name == "evaluation" else 0)
        found[name] = _outcome(loop.joinables, loop.case.batches(rank, steps=steps), counted)
        assert ran <= 1 and time.monotonic() - start_s < _TIMEOUT_S / 2, f"{name}: in iteration {ran}"
    return found


@pytest.fixture(scope="module")
def refused() -> list[dict[str, str]]:
    return run_ranks(_refused, 3, group_timeout_s=_TIMEOUT_S, timeout_s=120)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_the_first_iteration_with_a_remedy(refused: list[dict[str, str]], name: str) -> None:
    _, words, _ = REFUSED[name]
    for rank, found in enumerate(refused):
        assert re.search(words, found[name]), (rank, found[name])
    if name != "an argument":
        assert "join.iterate(iter(loader))" in refused[0][name]


def _late(rank: int, world_size: int) -> None:
    """An iteration that is not regular while all have inputs harms nobody, and one after that is refused."""
    counts = (7, 5)
    for irregular, words in ((2, "no error"), (6, "lr of OverlappedOptimizer went")):
        loop, steps = _Loop(rank), iter(range(counts[0]))

        def body(batch: Any, loop: _Loop = loop, steps: Any = steps, irregular: int = irregular) -> None:
            (_Loop.sets_the_rate if next(steps) == irregular else _Loop.train)(loop, batch)

        found = _outcome(loop.joinables, MLP.batches(rank, steps=counts[rank]), body, lengths=counts[rank])
        assert words in found, found


def test_iterations_after_which_a_rank_may_leave_are_compared_too() -> None:
    run_ranks(_late, 2, group_timeout_s=_TIMEOUT_S)


def _even(rank: int, world_size: int) -> None:
    loop = _Loop(rank)
    with Join(loop.joinables) as join:
        for batch in join.iterate(MLP.batches(rank, steps=3)):
            loop.accumulates(batch)


def test_ranks_that_end_together_may_run_any_loop() -> None:
    run_ranks(_even, 2)


@declare("element")
class _Counts(torch.optim.Optimizer):
    """SGD whose rate falls with a count of its calls in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["calls"])


class _SeveralSteps:
    """A wrapper of a scheduler such as Accelerate's: one ``step()`` is one of the scheduler inside for each process."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        for _ in range(2):
            self.scheduler.step()


def _with_groups_that_change(rank: int, world_size: int) -> None:
    counts = (5, 2)
    for form in ("reference", "plain", "interleaved", "deferred", "zero"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optim: Any = _Counts(ddp.parameters())
        if form == "zero":
            optim = ZeroRedundancyOptimizer(ddp.parameters(), _Counts, lr=0.1, overlap_with_ddp=True)
            chain(ZeroStep(optim)).register(ddp)
        elif form in ("interleaved", "deferred"):
            optim = OverlappedOptimizer(optim)
            chain(AllReduce(), Step(optim, deferred=form == "deferred")).register(ddp)
        scheduler = _SeveralSteps(torch.optim.lr_scheduler.ExponentialLR(optim, 0.9))

        def body(ddp: Any, optim: Any, batch: Any, scale: float, scheduler: Any = scheduler) -> None:
            optim.zero_grad()
            (mean_squared_error(ddp, batch) * scale).backward()
            optim.step()
            scheduler.step()

        if form == "reference":
            train_with_zero_loss(ddp, optim, MLP, rank, body=body, counts=counts)
            reference = ddp
            continue
        with Join([ddp, optim, scheduler]) as join:
            for batch in join.iterate(MLP.batches(rank, steps=counts[rank])):
                body(ddp, optim, batch, 1.0)
        assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=form)
        (group,) = optim.param_groups
        assert (group["calls"], group["lr"]) == (5, pytest.approx(0.1 * 0.9**10)), form


def test_groups_that_change_in_each_step_are_followed() -> None:
    run_ranks(_with_groups_that_change, 2)


def _without_a_batch(rank: int, world_size: int) -> list[Any]:
    """The update is made in backward, and rank 0 never runs one."""
    counts = (0, 4)
    results = []

    def plain(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
        optimizer.zero_grad()
        (mean_squared_error(ddp, batch) * scale).backward()
        optimizer.step()

    reference = wrap(MLP.model(), **MLP.ddp_options())
    momentum = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected = train_with_zero_loss(reference, momentum, MLP, rank, body=plain, counts=counts)["model"]
    for form in ("interleaved", "deferred", "zero"):
        for told_by in ("lengths", "stream"):
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            optim: Any = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
            if form == "zero":
                optim = ZeroRedundancyOptimizer(
                    ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, overlap_with_ddp=True
                )
            stages = [ZeroStep(optim)] if form == "zero" else [AllReduce(), Step(optim, deferred=form == "deferred")]
            chain(*stages).register(ddp)
            with joined([ddp, optim], MLP.batches(rank, steps=counts[rank]), told_by) as batches:
                for batch in batches:
                    mean_squared_error(ddp, batch).backward()
                    optim.step()
            results.append((form, told_by, snapshot(ddp, None)))
            assert_parity(results[-1][2]["model"], expected, what=f"{form}, {told_by}")
            # And all go on together.
            mean_squared_error(ddp, MLP.batch(9, rank)).backward()
            optim.step()
            results.append((form, told_by, "one more", snapshot(ddp, None)))
    return results


def test_a_rank_without_a_batch_makes_every_update_in_backward() -> None:
    assert_same_on_every_rank(run_ranks(_without_a_batch, 2, timeout_s=120), what="without a batch")


def _another_number(rank: int, world_size: int) -> None:
    """Rank 1 has other than it said, rank 0 what it said, and more or fewer than rank 1."""
    for said, has, told_by in ((4, 6, "lengths"), (2, 3, "loader"), (4, 2, "loader"), (6, 5, "lengths")):
        loop = _Loop(rank)

        class Loader:
            def __len__(self, said: int = said) -> int:
                return said if rank == 1 else 4

            def __iter__(self, has: int = has) -> Any:
                return iter(MLP.batches(rank, steps=has if rank == 1 else 4))

        loader = Loader()
        options = {"lengths": len(loader)} if told_by == "lengths" else {}
        found = _outcome(loop.joinables, loader, loop.train, **options)
        assert found.startswith("TrainingLoopError" if rank == 1 else "PeerError"), found
        assert "rank 1" in found and str(said) in found, found


def test_a_rank_that_ran_other_than_it_said_is_named_on_every_rank() -> None:
    run_ranks(_another_number, 2, group_timeout_s=_TIMEOUT_S, timeout_s=120)
