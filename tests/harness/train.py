"""One training loop for the reference and the candidate, which records every step."""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

from .models import BUCKET_CAP_MB, Batch, mean_squared_error

Loss = Callable[[nn.Module, Batch], Tensor]
StepOfLoop = Callable[[nn.Module, Any, Batch, Loss], Tensor]
_SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Record:
    """Clones of all that one step left behind. `gradients` is None unless asked for."""

    step: int
    loss: Tensor
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any]
    gradients: dict[str, Tensor | None] | None


def wrap(model: nn.Module, **ddp_options: Any) -> DistributedDataParallel:
    """DDP over a deep copy of `model`, with buckets of 1 KiB unless told otherwise."""
    return DistributedDataParallel(copy.deepcopy(model), **{"bucket_cap_mb": BUCKET_CAP_MB, **ddp_options})


def registered(form: str, ddp: Any, make: Any = _SGD, *, parameters: Any = None, **options: Any) -> Any:
    """Registers the stage of ``form`` with ``options`` and returns the optimizer for the loop.

    Examples of ``form``: ``zero deferred``, ``automatic``, ``released``, ``zero in forward``, ``zero by parameter``,
    ``zero behind a reducer``, ``zero alone``.
    """
    parameters = parameters or ddp.parameters()
    options = {"deferred": "deferred" in form, "release_gradients": "released" in form, **options}
    if form.startswith("zero"):
        partition = "parameter" if "by parameter" in form else None
        options_of_zero = {"partition": partition, "process_group": ddp.process_group, **make.keywords}
        zero = ZeroRedundancyOptimizer(parameters, make.func, **options_of_zero)
        if "alone" in form:
            return zero
        before = [AllReduce()] if "behind a reducer" in form else []
        gather = "forward" if "in forward" in form else "backward"
        chain(*before, ZeroStep(zero, gather=gather, automatic="automatic" in form, **options)).register(ddp)
        return zero
    plain = make(parameters)
    optimizer = plain if "automatic" in form else OverlappedOptimizer(plain)
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return optimizer


def plain_step(ddp: nn.Module, optimizer: Any, batch: Batch, loss_of: Loss) -> Tensor:
    """The usual loop, with `zero_grad` first."""
    optimizer.zero_grad()
    return overlapped_step(ddp, optimizer, batch, loss_of)


def overlapped_step(ddp: nn.Module, optimizer: Any, batch: Batch, loss_of: Loss) -> Tensor:
    """The loop without `zero_grad`: a registered chain clears the gradients itself."""
    loss = loss_of(ddp, batch)
    loss.backward()
    optimizer.step()
    return loss


def train(
    ddp: DistributedDataParallel,
    optimizer: Any,
    batches: Iterable[Batch],
    *,
    step_fn: StepOfLoop = plain_step,
    scheduler: Callable[[Any], Any] | None = None,
    gradients: bool = False,
    min_buckets: int = 2,
) -> list[Record]:
    """Trains over `batches` and returns one record per step, taken after the scheduler's step.

    `scheduler` makes a scheduler for the optimizer, as `lambda o: StepLR(o, 2, 0.5)` does; by default the rate
    falls at every step, so that an update with a stale rate shows. `gradients` also records `.grad` as it is
    after the step. After three steps or more, when DDP has rebuilt its buckets, it must have `min_buckets`.
    """
    schedule = (scheduler or _falling_rate)(optimizer)
    records = []
    for step, batch in enumerate(batches):
        loss = step_fn(ddp, optimizer, batch, mean_squared_error)
        schedule.step()
        records.append(_record(step, loss, ddp, optimizer, gradients=gradients))
    if len(records) >= 3:
        sizes_bytes = bucket_sizes_bytes(ddp)
        assert len(sizes_bytes) >= min_buckets, f"{sizes_bytes=}: lower bucket_cap_mb"
    return records


def _falling_rate(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def bucket_sizes_bytes(ddp: DistributedDataParallel) -> list[int]:
    """Sizes of the buckets as of the last forward, whatever hook is registered."""
    # Private: the public way is a communication hook, and a model under test has one already.
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(size) for size in str(sizes).split(",")]


def _record(step: int, loss: Tensor, ddp: DistributedDataParallel, optimizer: Any, *, gradients: bool) -> Record:
    module = ddp.module
    grads = {name: param.grad for name, param in module.named_parameters()} if gradients else {}
    return Record(
        step=step,
        loss=_clone(loss),
        parameters=_clone(dict(module.named_parameters())),
        buffers=_clone(dict(module.named_buffers())),
        optimizer=_clone(optimizer.state_dict()),
        gradients=_clone(grads) if gradients else None,
    )


def _clone(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)
