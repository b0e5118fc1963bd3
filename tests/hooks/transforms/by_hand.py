"""The same as each transform, by hand on plain DDP: on the mean, on this rank's own gradients, on new parameters."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Record, overlapped_step, train, wrap
from harness.models import MLP, Batch, Case, mean_squared_error
from overlap import OverlappedOptimizer, Stage, Step, ZeroRedundancyOptimizer, ZeroStep

STEPS = 4
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = functools.partial(torch.optim.AdamW, **ADAMW_OPTIONS)
Edit = Callable[[Any], None]
"""What is done to the `.grad` of a model's parameters."""


def clip_norm(ddp: Any) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)


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
    with ddp.no_sync() if local else contextlib.nullcontext():
        loss = backward_alone(ddp, optimizer, batch, loss_of)
    with torch.no_grad():
        if local:
            local(ddp)
            for parameter in ddp.parameters():
                parameter.grad.mul_(1 / dist.get_world_size())
                dist.all_reduce(parameter.grad)
        if mean:
            mean(ddp)
        optimizer.step()
        if updated:
            updated(ddp)
    return loss


def reference(case: Case, rank: int, **edits: Edit) -> list[Record]:
    ddp = wrap(case.model(), **case.ddp_options())
    # DDP does not rebuild its buckets where it never synchronizes.
    min_buckets = 1 if "local" in edits else 2
    batches, optimizer = case.batches(rank, steps=STEPS), ADAMW(ddp.parameters())
    step_fn = functools.partial(step, **edits)
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
    build: Callable[[Stage], Any], batches: list[Batch], *, partition: str = "element", **options: Any
) -> tuple[Any, list[dict[str, Tensor]]]:
    """The optimizer of a training with a sharded update, and the parameters after each step."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition=partition, **ADAMW_OPTIONS
    )
    build(ZeroStep(zero, **options)).register(ddp)
    records = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, gamma=0.9)
    for batch in batches:
        mean_squared_error(ddp, batch).backward()
        if not options.get("automatic"):
            zero.step()
        zero.wait()
        scheduler.step()
        records.append({name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()})
    return zero, records
