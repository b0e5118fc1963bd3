"""The stage after a reducer, under no_sync(), under the names of PyTorch, and registered again."""

from __future__ import annotations

import pytest
import torch
from zero_loops import ADAMW, ADAMW_OPTIONS, FORMS, check, plain_run, register, zero_run

from harness import assert_parity, bucket_calls, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    Cast,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    chain,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)


def _after_reducers(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, ADAMW)
    with bucket_calls(AllReduce) as calls:
        for form in ("interleaved", "deferred", "automatic, deferred"):
            candidate = zero_run(MLP, rank, torch.optim.AdamW, ADAMW_OPTIONS, FORMS[form], reducer=AllReduce())
            check(candidate, reference, what=form, world_size=world_size)
        cast = zero_run(MLP, rank, torch.optim.AdamW, ADAMW_OPTIONS, {}, reducer=Cast(torch.float64, AllReduce()))
        check(cast, reference, what="cast", world_size=world_size)
    assert len(calls) > 10


def test_after_a_reducer_each_rank_steps_its_part_of_the_result() -> None:
    run_ranks(_after_reducers, 2)


def _under_torch_names(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, ADAMW)
    for wrapper in (hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, overlap_with_ddp=True
        )
        ddp.register_comm_hook(None, wrapper(allreduce_hook, ddp, zero))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, gamma=0.9)
        for record in reference:
            zero.zero_grad()
            mean_squared_error(ddp, MLP.batch(record.step, rank)).backward()
            scheduler.step()
            ours = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
            assert_parity(ours, record.parameters, what=f"{wrapper.__name__}, step {record.step}")


def test_hooks_under_the_names_of_pytorch_update_from_the_first_iteration() -> None:
    run_ranks(_under_torch_names, 2)


def _registered_again(rank: int, world_size: int, first: str, second: str) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
    registration = chain(ZeroStep(zero, **(FORMS[first] or {}))).register(ddp)
    for step in range(5):
        if step == 3:
            registration.remove()
            register(FORMS[second], ddp, zero)
        plain.zero_grad()
        mean_squared_error(plain, MLP.batch(step, rank)).backward()
        reference.step()
        if step > 3 and second == "alone":
            zero.zero_grad()
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
        zero.wait()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"step {step}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("interleaved", "interleaved, gather in forward"),
        ("deferred", "interleaved"),
        ("interleaved", "alone"),
    ],
)
def test_a_stage_that_is_removed_leaves_nothing_behind(first: str, second: str) -> None:
    run_ranks(_registered_again, 2, first, second)


def _frozen_with_a_gradient(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
    for model, optimizer in ((plain, reference), (ddp, zero)):
        mean_squared_error(model, MLP.batch(0, rank)).backward()
        optimizer.step()
        model.module[0].weight.requires_grad_(False)
        optimizer.step()
    # Plain optimizers step whatever has a gradient, so its new value must reach the other ranks.
    assert torch.equal(ddp.module[0].weight, plain.module[0].weight)


def test_without_hooks_a_frozen_parameter_with_a_gradient_is_stepped_on_every_rank() -> None:
    run_ranks(_frozen_with_a_gradient, 2)
