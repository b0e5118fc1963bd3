"""`SkipNonFinite` is the loop `if all gradients are finite: optimizer.step()`, bit for bit, on every rank."""

import copy
import functools
from typing import Any

import pytest
import torch

from harness import Record, assert_parity, on_ranks, overlapped_step, train, wrap
from harness.models import MLP, UNUSED, Batch, Case, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    OverlappedOptimizer,
    SkipNonFinite,
    Step,
    UnsupportedError,
    chain,
)
from overlap._torch.foreach import LargestElements

from .by_hand import ADAMW, backward_alone, with_zero

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 6
# An infinite input reaches one gradient alone, that of the first weight, on one rank; an infinite target all.
BAD = {2: "input", 4: "target"}


def _batches(case: Case, rank: int, bad: dict[int, str] = BAD) -> list[Batch]:
    batches = case.batches(rank, steps=STEPS)
    for step, what in bad.items() if rank == 1 else ():
        batch = batches[step]
        if what == "input":
            values = batch.inputs[0].clone()
            values[0, 0] = float("inf")
            batches[step] = Batch((values, *batch.inputs[1:]), batch.target)
        else:
            batches[step] = Batch(batch.inputs, batch.target.fill_(float("inf")))
    return batches


def _guarded_step(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    if all(p.grad.isfinite().all() for p in ddp.parameters() if p.grad is not None):
        optimizer.step()
    return loss


def _by_hand(case: Case, rank: int, make: Any) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    return train(ddp, make(ddp.parameters()), _batches(case, rank), step_fn=_guarded_step, gradients=True)


def _replicated(rank: int) -> None:
    every = ("interleaved", "deferred", "automatic", "automatic, deferred")
    for make, case, forms in ((ADAMW, MLP, every), (MOMENTUM, UNUSED, every[:2])):
        by = _by_hand(case, rank, make)
        for form in forms:
            ddp = wrap(case.model(), **case.ddp_options())
            optimizer = make(ddp.parameters())
            is_automatic = form.startswith("automatic")
            if not is_automatic:
                optimizer = OverlappedOptimizer(optimizer)
            skip = SkipNonFinite()
            skips: list[float] = []

            def note(step: Any, *rest: Any, skip: SkipNonFinite = skip, skips: list[float] = skips) -> Any:
                loss = step(*rest)
                assert skip.skipped is not None and skip.skipped.shape == ()
                skips.append(float(skip.skipped))
                return loss

            chain(AllReduce(), skip, Step(optimizer, deferred="deferred" in form)).register(ddp)
            step_fn = functools.partial(note, backward_alone if is_automatic else overlapped_step)
            candidate = train(ddp, optimizer, _batches(case, rank), step_fn=step_fn, gradients=True)
            assert_parity(candidate, by, what=f"{form}, {case}")
            assert skips == [float(step in BAD) for step in range(STEPS)], form


def _sharded(rank: int) -> None:
    by = _by_hand(MLP, rank, ADAMW)
    forms: tuple[dict[str, Any], ...] = ({}, {"deferred": True}, {"gather": "forward"})
    # By parameter, and where the update reduces by itself, only one rank has the gradient that is not finite.
    for options, partition in [*((options, "element") for options in forms), ({}, "parameter")]:
        reducer = [] if partition == "parameter" else [AllReduce()]
        build = lambda update, reducer=reducer: chain(*reducer, SkipNonFinite(), update)  # noqa: E731
        zero, found = with_zero(build, _batches(MLP, rank), partition=partition, **options)
        assert_parity(found, [record.parameters for record in by], what=f"by {partition}, {options}")
        zero.consolidate_state_dict()
        if rank == 0:
            assert_parity(zero.state_dict()["state"], by[-1].optimizer["state"], what=f"the state, {options}")


def _hooks_and_outsiders(rank: int) -> None:
    """A step that is left out runs no step hooks, and leaves parameters alone that are in no model."""
    for deferred in (False, True):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        outside = torch.nn.Parameter(torch.ones(3))
        optimizer = OverlappedOptimizer(MOMENTUM([*ddp.parameters(), outside]))
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        chain(AllReduce(), SkipNonFinite(), Step(optimizer, deferred=deferred)).register(ddp)
        for step, batch in enumerate(_batches(MLP, rank)):
            before, hooks = outside.detach().clone(), len(calls)
            optimizer.zero_grad()
            (mean_squared_error(ddp, batch) + outside.sum()).backward()
            optimizer.step()
            assert torch.equal(before, outside) is (step in BAD), (deferred, step)
            assert len(calls) - hooks == (step not in BAD), (deferred, step)


def _several(rank: int) -> None:
    """A step is left out of all updates of a chain; and of both models of one optimizer."""
    ddp, *models = (wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 0, 1))
    parts = list(ddp.parameters())[:4], list(ddp.parameters())[4:]
    optimizers = [OverlappedOptimizer(ADAMW(part)) for part in parts]
    chain(AllReduce(), SkipNonFinite(), *map(Step, optimizers)).register(ddp)
    both = OverlappedOptimizer(ADAMW([p for one in models for p in one.parameters()]))
    for one in models:
        chain(AllReduce(), SkipNonFinite(), Step(both, deferred=True)).register(one)
    every = [ddp, *models]
    for step, batch in enumerate(_batches(MLP, rank)):
        before = [copy.deepcopy(one.module.state_dict()) for one in every]
        for one in every:
            mean_squared_error(one, MLP.batch(step, rank) if one is models[0] else batch).backward()
        for optimizer in (*optimizers, both):
            optimizer.step()
        for one, was in zip(every, before, strict=True):
            for name, value in one.module.state_dict().items():
                assert torch.equal(value, was[name]) is (step in BAD), (name, step)


def _first_step_and_sums(rank: int) -> None:
    """No state is made in a step that is left out; a backward that is added to a bad one is left out with it."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    plain = ADAMW(ddp.parameters())
    optimizer = OverlappedOptimizer(plain)
    chain(AllReduce(), SkipNonFinite(), Step(optimizer, deferred=True)).register(ddp)
    bad = _batches(MLP, rank, {0: "target"})[0]
    before = copy.deepcopy(ddp.module.state_dict())
    mean_squared_error(ddp, bad).backward()
    mean_squared_error(ddp, MLP.batch(1, rank)).backward()
    optimizer.step()
    assert_parity(ddp.module.state_dict(), before, what="a sum that is not finite")
    assert not plain.state


def _refused(rank: int) -> None:
    ddp, other = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    for stages in (
        (SkipNonFinite(), AllReduce(), Step(optimizer)),
        (AllReduce(), SkipNonFinite()),
        (AllReduce(), Step(optimizer), SkipNonFinite()),
    ):
        with pytest.raises(ConfigurationError, match=r"stands between them: chain\(AllReduce\(\), SkipNon"):
            chain(*stages).register(ddp)
    both = OverlappedOptimizer(ADAMW([*ddp.parameters(), *other.parameters()]))
    chain(AllReduce(), SkipNonFinite(), Step(both)).register(ddp)
    with pytest.raises(UnsupportedError, match=r"serves two models.*deferred=True"):
        chain(AllReduce(), Step(both)).register(other)


@on_ranks(2, timeout_s=120)
def test_steps_are_left_out_as_by_hand(rank: int, world_size: int) -> None:
    for scenario in (_replicated, _sharded, _hooks_and_outsiders, _several, _first_step_and_sums, _refused):
        scenario(rank)


def test_what_only_float64_holds_is_finite() -> None:
    largest = LargestElements()
    largest.update([torch.tensor([1e300], dtype=torch.float64), torch.ones(2)])
    assert largest.found_inf(torch.device("cpu")) == 0
    largest.update([torch.tensor([float("nan")], dtype=torch.bfloat16)])
    assert largest.found_inf(torch.device("cpu")) == 1
