"""The same as each transform, by hand on plain DDP: on the mean, on this rank's own gradients, on new parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Record, overlapped_step, train, wrap
from harness.models import Batch, Case
from overlap import (
    AllReduce,
    ClipGradNorm,
    OverlappedOptimizer,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

STEPS = 4
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = functools.partial(torch.optim.AdamW, **ADAMW_OPTIONS)
Edit = Callable[[Any], None]
"""What is done to the `.grad` of a model's parameters."""


def clip_norm(ddp: Any, norm_type: float = 2.0) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05, norm_type=norm_type)


def gradients(ddp: Any) -> list[Tensor]:
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


# The stage, and the edit of `.grad` that it stands for.
TRANSFORMS: dict[str, tuple[Callable[[], Any], Callable[[], Edit]]] = {
    "ClipGradNorm": (lambda: ClipGradNorm(0.05), lambda: clip_norm),
    "ClipGradNorm, largest": (
        lambda: ClipGradNorm(0.05, float("inf")),
        lambda: functools.partial(clip_norm, norm_type=float("inf")),
    ),
}


def step(
    ddp: Any,
    optimizer: Any,
    batch: Batch,
    loss_of: Any,
    *,
    local: Edit | None = None,
    mean: Edit | None = None,
    updated: Edit | None = None,
) -> Tensor:
    """A step of plain DDP with edits of what there is."""
    optimizer.zero_grad()
    loss = backward(ddp, batch, loss_of, local)
    with torch.no_grad():
        if mean is not None:
            mean(ddp)
        optimizer.step()
        if updated is not None:
            updated(ddp)
    return loss


def backward(ddp: Any, batch: Batch, loss_of: Any, local: Edit | None) -> Tensor:
    if local is None:
        loss: Tensor = loss_of(ddp, batch)
        loss.backward()
        return loss
    with ddp.no_sync():
        loss = loss_of(ddp, batch)
        loss.backward()
    with torch.no_grad():
        local(ddp)
        for gradient in gradients(ddp):
            gradient.mul_(1 / dist.get_world_size())
            dist.all_reduce(gradient)
    return loss


def reference(case: Case, rank: int, steps: int = STEPS, **edits: Edit | None) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    step_fn = functools.partial(step, **edits)
    # DDP does not rebuild its buckets where it never synchronizes.
    min_buckets = 1 if edits.get("local") is not None else 2
    batches, optimizer = case.batches(rank, steps=steps), ADAMW(ddp.parameters())
    return train(ddp, optimizer, batches, step_fn=step_fn, gradients=True, min_buckets=min_buckets)


def backward_alone(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> Tensor:
    loss: Tensor = loss_of(ddp, batch)
    loss.backward()
    return loss


def with_step(case: Case, rank: int, build: Callable[[Stage], Any], form: str) -> list[Record]:
    """Training with the chain that `build` makes of the update."""
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer: Any = ADAMW(ddp.parameters())
    if not form.startswith("automatic"):
        optimizer = OverlappedOptimizer(optimizer)
    build(Step(optimizer, deferred="deferred" in form)).register(ddp)
    step_fn = backward_alone if form.startswith("automatic") else overlapped_step
    return train(ddp, optimizer, case.batches(rank, steps=STEPS), step_fn=step_fn, gradients=True)


def with_zero(
    case: Case, rank: int, build: Callable[[Stage], Any], options: dict[str, Any], **zero_options: Any
) -> Any:
    """The parameters after each step of training with a sharded update."""
    ddp = wrap(case.model(), **case.ddp_options())
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW_OPTIONS, **zero_options
    )
    build(ZeroStep(zero, **options)).register(ddp)
    records = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, gamma=0.9)
    for batch in case.batches(rank, steps=STEPS):
        loss = torch.nn.functional.mse_loss(ddp(*batch.inputs), batch.target)
        loss.backward()
        if not options.get("automatic"):
            zero.step()
        zero.wait()
        scheduler.step()
        records.append({name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()})
    return records


def after_reducer(make: Callable[[], Any]) -> Callable[[Stage], Any]:
    return lambda update: chain(AllReduce(), make(), update)


def before_reducer(make: Callable[[], Any]) -> Callable[[Stage], Any]:
    return lambda update: chain(make(), AllReduce(), update)
