"""What the texts of a program stand for, and what plain DDP does by hand in the place of transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import overlap
from bucket_functions import centralize, clip_value, scale
from harness import third_party
from overlap import hooks, optim

from .networks import Net

__all__ = ["LOCAL", "MEAN", "NEW", "local_hook", "names_of_texts"]


def look(bucket: overlap.Bucket) -> None:
    """Changes nothing."""


@torch.no_grad()
def clamp(bucket: overlap.Bucket) -> None:
    for parameter in bucket.parameters:
        parameter.clamp_(-0.2, 0.2)


@torch.no_grad()
def shrink(bucket: overlap.Bucket) -> None:
    for parameter in bucket.parameters:
        parameter.mul_(0.99)


@overlap.reducer
async def mean_by_hand(bucket: overlap.Bucket) -> None:
    bucket.buffer.div_(bucket.divisor)
    await hooks.all_reduce(bucket.buffer, group=bucket.group)


def everything(ddp: Any) -> list[Tensor]:
    return list(ddp.parameters())


def matrices(ddp: Any) -> list[Tensor]:
    return [parameter for parameter in ddp.parameters() if parameter.ndim >= 2]


def others(ddp: Any) -> list[Tensor]:
    return [parameter for parameter in ddp.parameters() if parameter.ndim < 2]


def hidden(ddp: Any) -> list[Tensor]:
    """What Muon takes."""
    return [
        parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.ndim == 2 and name.startswith("blocks.") and parameter.numel()
    ]


def but_hidden(ddp: Any) -> list[Tensor]:
    left_out = {id(parameter) for parameter in hidden(ddp)}
    return [parameter for parameter in ddp.parameters() if id(parameter) not in left_out]


def groups(ddp: Any) -> list[dict[str, Any]]:
    return [{"params": matrices(ddp), "lr": 0.02}, {"params": others(ddp)}]


def hooked(ddp: Any, optimizer: Any) -> Any:
    """Registered with DDP itself."""
    state = overlap.OptimizerHookState(optimizer)
    ddp.register_comm_hook(None, overlap.hook_then_optimizer(overlap.allreduce_hook, state))
    return optimizer


def names_of_texts() -> dict[str, Any]:
    """What a program's texts see, but for the model, its parameters and its optimizers."""
    of_library = {name: getattr(part, name) for part in (optim, hooks, overlap) for name in part.__all__}
    own = (look, clamp, shrink, mean_by_hand, everything, matrices, others, hidden, but_hidden, groups, hooked)
    functions = (scale, clip_value, centralize)
    of_others = (third_party.Lion, third_party.LAMB, third_party.BlockwiseAdamW, third_party.SGLD)
    return {
        **of_library,
        **{one.__name__: one for one in (*own, *functions, *of_others)},
        "torch": torch,
        "default_hooks": default_hooks,
        "DistributedDataParallel": DistributedDataParallel,
        "Net": Net,
        "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
        "clip_grad_value_": torch.nn.utils.clip_grad_value_,
    }


# By text, what makes a function that does the same by hand ------------------------------------------------------------


def _scale(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(0.5)


def _centralize(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dim() > 1 and tensor.numel():
            tensor.sub_(tensor.mean(dim=tuple(range(1, tensor.dim())), keepdim=True))


def _clamp(limit: float) -> Callable[[Sequence[Tensor]], None]:
    def clamp(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.clamp_(-limit, limit)

    return clamp


LOCAL: dict[str, Callable[[Sequence[Tensor]], None]] = {
    "scale(0.5)": _scale,
    "clip_value(0.05)": _clamp(0.05),
    "centralize": _centralize,
    "look": lambda tensors: None,
}
"""Of gradients of this rank."""

Parameters = Sequence[Tensor]
ByHand = Callable[[Parameters], bool | None]


def _of_gradients(act: Callable[[Sequence[Tensor]], None]) -> Callable[[], ByHand]:
    def by_hand(parameters: Parameters) -> None:
        act([parameter.grad for parameter in parameters if parameter.grad is not None])

    return lambda: by_hand


def _are_finite(parameters: Parameters) -> bool:
    return all(bool(one.grad.isfinite().all()) for one in parameters if one.grad is not None)


MEAN: dict[str, Callable[[], ByHand]] = {
    "scale(0.5)": _of_gradients(_scale),
    "clip_value(0.02)": _of_gradients(_clamp(0.02)),
    "centralize": _of_gradients(_centralize),
    "ClipGradNorm(0.1)": lambda: lambda parameters: _clip(parameters, 2.0),
    "ClipGradNorm(0.1, float('inf'))": lambda: lambda parameters: _clip(parameters, float("inf")),
    "SkipNonFinite()": lambda: _are_finite,
    "Log(lambda step, norms: None)": lambda: lambda parameters: None,
    "look": lambda: lambda parameters: None,
}
"""Of the mean in ``.grad``; one that gives ``False`` leaves out the step."""


def _clip(parameters: Parameters, norm_type: float) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)


def _scale_new(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(0.99)


NEW: dict[str, Callable[[Sequence[Tensor]], None]] = {
    "clamp": _clamp(0.2),
    "shrink": _scale_new,
    "look": lambda tensors: None,
}
"""Of new parameters."""


def _in_order_of_memory(bucket: dist.GradBucket) -> list[Tensor]:
    """The gradients, as they lie in the bucket; ``bucket.gradients()`` has them as if parameters were contiguous."""
    gradients, parameters = bucket.gradients(), bucket.parameters()
    return [
        gradient if parameter.is_complex() else gradient.as_strided(parameter.shape, parameter.stride())
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]


def local_hook(texts: Iterable[str]) -> Any:
    """A hook of plain DDP that changes each rank's own gradients before their mean; its state gets the largest."""
    acts = [LOCAL[text] for text in texts]

    def hook(largest, bucket):
        buffer = bucket.buffer()
        for act in acts:
            act(_in_order_of_memory(bucket))
        if largest is not None and buffer.numel():
            torch.maximum(largest, buffer.abs().max().to(largest), out=largest)
        work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    return hook
