"""`SkipNonFinite` is the loop `if all gradients are finite: optimizer.step()`, bit for bit, on every rank."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from harness import Record, assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import MLP, UNUSED, Batch, Case, mean_squared_error
from overlap import (
    AllReduce,
    ClipGradNorm,
    ConfigurationError,
    OverlappedOptimizer,
    SkipNonFinite,
    Step,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks.finite import LargestElements

from .by_hand import ADAMW, ADAMW_OPTIONS, backward_alone

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 6
# An infinite input reaches one gradient alone, that of the first weight, on one rank; an infinite target all.
BAD = {2: "input", 4: "target"}


def _batches(case: Case, rank: int, bad: dict[int, str] = BAD) -> list[Batch]:
    batches = case.batches(rank, steps=STEPS)
    for step, what in bad.items():
        if rank != 1:
            continue
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


def _replicated(rank: int, world_size: int) -> None:
    every = ("interleaved", "deferred", "automatic", "automatic, deferred")
    runs = ((ADAMW, MLP, every), (MOMENTUM, MLP, every[:1]), (MOMENTUM, UNUSED, every[:2]))
    for make, case, forms in runs:
        by = _by_hand(case, rank, make)
        assert not by[2].gradients["0.weight" if case is MLP else "trunk.0.weight"].isfinite().all()  # type: ignore[index, union-attr]
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


def test_steps_of_a_replicated_update_are_left_out() -> None:
    run_ranks(_replicated, 2)


def _sharded(rank: int, world_size: int) -> None:
    by = [record.parameters for record in _by_hand(MLP, rank, ADAMW)]
    state = _by_hand(MLP, rank, ADAMW)[-1].optimizer["state"]
    forms: tuple[dict[str, Any], ...] = (
        {},
        {"deferred": True},
        {"gather": "forward"},
        {"automatic": True, "deferred": True},
        {"clip_grad_norm": 1e6},
    )
    for options, reduces in [*((options, False) for options in forms), ({}, True), ({"deferred": True}, True)]:
        # By parameter only one rank has the gradient that is not finite.
        for partition in ("parameter",) if reduces else ("element",):
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition=partition, **ADAMW_OPTIONS
            )
            stages = SkipNonFinite(), ZeroStep(zero, **options)
            (chain(*stages) if reduces else chain(AllReduce(), *stages)).register(ddp)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, gamma=0.9)
            for step, batch in enumerate(_batches(MLP, rank)):
                mean_squared_error(ddp, batch).backward()
                if not options.get("automatic"):
                    zero.step()
                zero.wait()
                scheduler.step()
                ours = dict(ddp.module.named_parameters())
                assert_parity(ours, by[step], what=f"step {step} by {partition}, {options}")
            zero.consolidate_state_dict()
            if rank == 0:
                assert_parity(zero.state_dict()["state"], state, what=f"the state by {partition}, {options}")


def test_steps_of_a_sharded_update_are_left_out() -> None:
    run_ranks(_sharded, 2)


def _hooks_and_outsiders(rank: int, world_size: int) -> None:
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


def test_what_else_a_step_does_is_left_out_with_it() -> None:
    run_ranks(_hooks_and_outsiders, 2)


def _first_step(rank: int, world_size: int) -> None:
    """No state is made in a first step that is left out; and what the loop sets by hand afterwards is applied."""
    for form in ("automatic", "deferred"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        plain = MOMENTUM(ddp.parameters())
        optimizer: Any = plain
        if form == "deferred":
            optimizer = OverlappedOptimizer(plain)
        chain(AllReduce(), SkipNonFinite(), Step(optimizer)).register(ddp)
        before = copy.deepcopy(ddp.module.state_dict())
        mean_squared_error(ddp, _batches(MLP, rank, {0: "target"})[0]).backward()
        if form == "deferred":
            optimizer.step()
        assert_parity(ddp.module.state_dict(), before, what=form)
        assert not plain.state, form
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()
        if form == "deferred":
            optimizer.step()
        assert plain.state, form


def test_no_state_comes_of_a_first_step_that_is_left_out() -> None:
    run_ranks(_first_step, 2)


def _after_clipping(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(AllReduce(), ClipGradNorm(0.05), SkipNonFinite(), Step(optimizer)).register(ddp)
    by = wrap(MLP.model(), **MLP.ddp_options())
    plain = ADAMW(by.parameters())
    for batch in _batches(MLP, rank):
        overlapped_step(ddp, optimizer, batch, mean_squared_error)
        plain.zero_grad()
        mean_squared_error(by, batch).backward()
        torch.nn.utils.clip_grad_norm_(by.parameters(), 0.05)
        if all(p.grad.isfinite().all() for p in by.parameters()):
            plain.step()
        assert_parity(ddp.module.state_dict(), by.module.state_dict(), what="clipped, then looked at")


def test_it_looks_at_what_a_clip_has_left() -> None:
    run_ranks(_after_clipping, 2)


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    for stages in (
        (SkipNonFinite(), AllReduce(), Step(optimizer)),
        (AllReduce(), SkipNonFinite()),
        (AllReduce(), Step(optimizer), SkipNonFinite()),
    ):
        with pytest.raises(ConfigurationError, match=r"stands between them: chain\(AllReduce\(\), SkipNon"):
            chain(*stages).register(ddp)
    other = wrap(MLP.model(), **MLP.ddp_options())
    both = OverlappedOptimizer(ADAMW([*ddp.parameters(), *other.parameters()]))
    chain(AllReduce(), SkipNonFinite(), Step(both)).register(ddp)
    with pytest.raises(UnsupportedError, match=r"serves two models.*deferred=True"):
        chain(AllReduce(), Step(both)).register(other)


def test_where_it_cannot_do_its_work_it_is_refused() -> None:
    run_ranks(_refused, 2)


def _two_models(rank: int, world_size: int) -> None:
    """One optimizer of two models: what one of them finds leaves out the step of both."""
    models = [wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1)]
    optimizer = OverlappedOptimizer(ADAMW([p for ddp in models for p in ddp.parameters()]))
    for ddp in models:
        chain(AllReduce(), SkipNonFinite(), Step(optimizer, deferred=True)).register(ddp)
    for step, batch in enumerate(_batches(MLP, rank)):
        before = [copy.deepcopy(ddp.module.state_dict()) for ddp in models]
        mean_squared_error(models[0], MLP.batch(step, rank)).backward()
        mean_squared_error(models[1], batch).backward()
        optimizer.step()
        for ddp, was in zip(models, before, strict=True):
            is_same = all(torch.equal(value, was[name]) for name, value in ddp.module.state_dict().items())
            assert is_same is (step in BAD)


def test_one_optimizer_of_two_models_leaves_out_the_step_of_both() -> None:
    run_ranks(_two_models, 2)


def _skip_update_after(rank: int, world_size: int) -> None:
    """A backward that is added to one that was not finite is not finite either; one that is discarded is forgotten."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(AllReduce(), SkipNonFinite(), Step(optimizer, deferred=True)).register(ddp)
    bad = _batches(MLP, rank, {0: "target"})[0]
    before = copy.deepcopy(ddp.module.state_dict())
    mean_squared_error(ddp, bad).backward()
    mean_squared_error(ddp, MLP.batch(1, rank)).backward()
    optimizer.step()
    assert_parity(ddp.module.state_dict(), before, what="a sum that is not finite")
    with pytest.raises(TrainingLoopError):
        optimizer.step()
    mean_squared_error(ddp, bad).backward()
    optimizer.zero_grad()
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(ddp.module.state_dict()["0.weight"], before["0.weight"])


def test_what_was_found_holds_as_long_as_its_gradients() -> None:
    run_ranks(_skip_update_after, 2)


def test_what_only_float64_holds_is_finite() -> None:
    largest = LargestElements()
    largest.look([torch.tensor([1e300], dtype=torch.float64), torch.ones(2)])
    assert largest.found_inf(torch.device("cpu")) == 0
    largest.look([torch.tensor([float("nan")], dtype=torch.bfloat16)])
    assert largest.found_inf(torch.device("cpu")) == 1
