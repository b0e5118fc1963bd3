"""Local SGD written down plainly, to compare with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import plain_step, wrap
from harness.models import Case, mean_squared_error
from overlap.optim.local_sgd import LocalSGD

Values = dict[str, Tensor]


def values_of(model: nn.Module) -> Values:
    named = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def mean_of(values: Values, group: Any = None) -> Values:
    means = {}
    for name, value in values.items():
        total = value / dist.get_world_size(group)
        dist.all_reduce(total, group=group)
        means[name] = total
    return means


@torch.no_grad()
def assign(model: nn.Module, values: Values) -> None:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in values.items():
        tensors[name].copy_(value)


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def plain(
    case: Case,
    rank: int,
    *,
    steps: int,
    start_step: int,
    after_step: Callable[[nn.Module, Any, int], None],
    make: Callable[[Any], Any] = sgd,
    gradient_group: Any = None,
) -> list[Values]:
    """Plain SGD on each rank, gradients averaged by hand, then ``after_step(model, optimizer, local steps)``."""
    model = case.model()
    optimizer = make(model.parameters())
    records = []
    for step in range(steps):
        optimizer.zero_grad()
        mean_squared_error(model, case.batch(step, rank)).backward()
        is_local = step >= start_step
        if not is_local or gradient_group is not None:
            group = gradient_group if is_local else None
            for parameter in model.parameters():
                parameter.grad /= dist.get_world_size(group)
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        if is_local:
            after_step(model, optimizer, step + 1 - start_step)
        records.append(values_of(model))
    return records


def local(
    case: Case, rank: int, *, steps: int, make: Callable[[Any], Any] = sgd, build: Callable[[Any, Any], LocalSGD]
) -> tuple[list[Values], LocalSGD, Any]:
    ddp = wrap(case.model(), **case.ddp_options())
    made = build(ddp, make(ddp.parameters()))
    return run(case, rank, range(steps), ddp, made), made, ddp


def run(case: Case, rank: int, steps: Sequence[int], ddp: Any, made: LocalSGD) -> list[Values]:
    records = []
    for step in steps:
        plain_step(ddp, made, case.batch(step, rank), mean_squared_error)
        records.append(values_of(ddp.module))
    return records
