"""What a loop may do inside of Join: two forwards, evaluate, leave parameters unused; and one Join after another."""

from typing import Any

import pytest
import torch
from join_loops import (
    FORMS,
    TOLD_BY,
    assert_same_on_every_rank,
    make,
    plain_body,
    train_unevenly,
    train_with_zero_loss,
)

from harness import UNKNOWN_BACKEND, assert_parity, on_ranks, wrap
from harness.models import BATCH_NORM, MLP, UNUSED_ON_SOME_RANKS, Case
from overlap import declare

SUMMATION = "three and four ranks' gradients are added up in another order"


ADAMW: dict[str, Any] = {"cls": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1}


def _two_forwards(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    optimizer.zero_grad()
    first, second = ddp(*batch.inputs), ddp(*(-each for each in batch.inputs))
    ((first - second + batch.target).square().mean() * scale).backward()
    optimizer.step()


def _evaluating(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    """A forward under no_grad on either side of the training step."""
    with torch.no_grad():
        ddp(*batch.inputs)
    plain_body(ddp, optimizer, batch, scale)
    with torch.no_grad():
        ddp.eval()
        ddp(*batch.inputs)
        ddp.train()


# With BatchNorm DDP itself cannot have two forwards before a backward.
LOOPS: list[tuple[Any, Case]] = [(_two_forwards, MLP), (_evaluating, MLP), (_evaluating, BATCH_NORM)]


@on_ranks(2, timeout_s=120)
def test_any_loop_is_followed(rank: int, world_size: int) -> None:
    for body, case in LOOPS:
        ddp = wrap(case.model(), **case.ddp_options())
        reference = train_with_zero_loss(ddp, make(ddp, "plain", **ADAMW), case, rank, body=body)
        for form in ("plain", "interleaved", "deferred"):
            ddp = wrap(case.model(), **case.ddp_options())
            ours = train_unevenly(ddp, make(ddp, form, **ADAMW), case, rank, FORMS[form], body=body)
            if case is MLP:
                assert_parity(ours, reference, what=f"{body.__name__}, {form}")
            assert_same_on_every_rank(ours, what=f"{case.name}, {form}")


# The model, how it is updated, and how a Join learns of it.
SEVERAL: list[tuple[Case, str, str]] = [
    (MLP, "interleaved", "forwards"),
    (MLP, "deferred", "batches"),
    (MLP, "zero", "forwards"),
    (UNUSED_ON_SOME_RANKS, "interleaved", "batches"),
]


@on_ranks(4, timeout_s=120)
def test_one_join_after_another_with_ranks_without_a_batch(rank: int, world_size: int) -> None:
    """The first rank without a batch; then a second Join with other numbers, a third with equal ones."""
    for case, form, told_by in SEVERAL:
        ddp, plain_ddp = (wrap(case.model(), **case.ddp_options()) for _ in range(2))
        optimizer, plain = make(ddp, form, **ADAMW), make(plain_ddp, "plain", **ADAMW)
        for counts in ((0, 3, 2, 4), (3, 2, 0, 3), (2, 2, 2, 2)):
            ours = train_unevenly(ddp, optimizer, case, rank, told_by, counts=counts)
            what = f"{case}, {form}, {counts}"
            assert_same_on_every_rank(ours, what=what)
            if case is MLP:
                reference = train_with_zero_loss(plain_ddp, plain, case, rank, body=plain_body, counts=counts)
                reference = {key: reference[key] for key in ours}
                assert_parity(ours, reference, what=what, rtol=2e-3, atol=2e-4, reason=SUMMATION)


@on_ranks(4, backend=UNKNOWN_BACKEND)
def test_join_on_a_backend_without_channels_of_our_own(rank: int, world_size: int) -> None:
    for told_by in TOLD_BY:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        ended = train_unevenly(ddp, make(ddp, "interleaved", **ADAMW), MLP, rank, told_by, counts=(3, 0, 2, 5))
        assert_same_on_every_rank(ended, what=told_by)


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


def _body_with(scheduler: Any) -> Any:
    def body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
        plain_body(ddp, optimizer, batch, scale)
        scheduler.step()

    return body


@on_ranks(2)
def test_groups_that_change_in_each_step_are_followed(rank: int, world_size: int) -> None:
    counts = (5, 2)

    def build(form: str) -> tuple[Any, Any, Any]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = make(ddp, form, _Counts, lr=0.1)
        return ddp, optimizer, _SeveralSteps(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))

    reference, optimizer, scheduler = build("plain")
    train_with_zero_loss(reference, optimizer, MLP, rank, body=_body_with(scheduler), counts=counts)
    for form in FORMS:
        ddp, optimizer, scheduler = build(form)
        train_unevenly(ddp, optimizer, MLP, rank, "batches", scheduler=scheduler, counts=counts)
        assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=form)
        (group,) = optimizer.param_groups
        assert (group["calls"], group["lr"]) == (5, pytest.approx(0.1 * 0.9**10)), form
