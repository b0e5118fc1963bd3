"""What may be chosen: chains and plain DDP, with what each may change in the result, how it is built, what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap.hooks import AllReduce, Cast, Int8, PowerSGD, Quantize, Stage, chain
from overlap.optim import OverlappedOptimizer, Step, ZeroStep
from overlap.plan.optimizers import backward_obstacle, sharded, sharding_obstacle

__all__ = ["ALLOW", "CANDIDATES", "KINDS", "METHODS", "PLAIN", "Candidate", "Method", "build", "obstacles", "wrap"]

KINDS = ("exact", "16-bit", "8-bit", "low-rank")
"""What a method may do to gradients; "exact": equal to plain DDP up to the order of a sum."""
ALLOW = (*KINDS, "sharded")
"""What may be named in ``allow``: kinds of result, and an optimizer that is another object."""
BUCKET_SIZES_MB: tuple[float | None, ...] = (None, 2.0, 8.0, 50.0)
Update = Literal["after backward", "in backward", "sharded", "sharded, gathered in forward"]
_LOW_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to reduce and to update."""

    name: str
    kind: str
    update: Update
    reducer: Callable[[], Stage] | None = None
    """Makes its reducer; ``None`` for DDP's own and for the sharded update's."""
    extra_bytes: Callable[[int], float] = lambda gradient_bytes: 0.0
    """What it keeps between steps besides, for so many bytes of gradients."""

    @property
    def compresses(self) -> bool:
        return self.kind != "exact"

    @property
    def is_deferred(self) -> bool:
        """Whether it updates where the loop calls ``step()``, which may clip, scale or skip before that."""
        return self.update == "after backward"

    @property
    def is_sharded(self) -> bool:
        return self.update.startswith("sharded")


PLAIN = "ddp"
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name=PLAIN, kind="exact", update="after backward"),
        Method(name="step", kind="exact", update="in backward", reducer=AllReduce),
        Method(name="zero", kind="exact", update="sharded"),
        Method(name="zero-forward", kind="exact", update="sharded, gathered in forward"),
        Method(
            name="bf16",
            kind="16-bit",
            update="in backward",
            reducer=lambda: Cast(torch.bfloat16, AllReduce()),
            extra_bytes=lambda gradient_bytes: gradient_bytes / 2,
        ),
        Method(
            name="fp16",
            kind="16-bit",
            update="in backward",
            reducer=lambda: Cast(torch.float16, AllReduce()),
            extra_bytes=lambda gradient_bytes: gradient_bytes / 2,
        ),
        Method(
            name="int8",
            kind="8-bit",
            update="in backward",
            reducer=lambda: Quantize(Int8()),
            extra_bytes=lambda gradient_bytes: gradient_bytes / 4,
        ),
        Method(
            name=f"powersgd-{_LOW_RANK}",
            kind="low-rank",
            update="in backward",
            reducer=lambda: PowerSGD(rank=_LOW_RANK),
            extra_bytes=lambda gradient_bytes: gradient_bytes,
        ),
    )
}
# The same reducers with an update where the loop calls step().
METHODS.update(
    {
        f"{one.name}-deferred": replace(one, name=f"{one.name}-deferred", update="after backward")
        for one in METHODS.values()
        if one.reducer is not None and one.compresses
    }
)


@dataclass(frozen=True, order=True)
class Candidate:
    """A method with a size of buckets, in MB; ``None`` leaves the size to DDP."""

    method: str
    bucket_cap_mb: float | None = None

    def __str__(self) -> str:
        return self.method if self.bucket_cap_mb is None else f"{self.method}, {self.bucket_cap_mb:g} MB"

    @property
    def is_plain(self) -> bool:
        """Whether it is plain DDP."""
        return self == Candidate(PLAIN)


CANDIDATES = tuple(Candidate(method, size) for method in METHODS for size in BUCKET_SIZES_MB)


def obstacles(optimizer: Optimizer, *, has_sparse_gradients: bool) -> dict[str, str]:
    """The methods that ``optimizer`` and the model rule out, and why."""
    sparse = "gradients are sparse" if has_sparse_gradients else None
    sharding, in_backward = sharding_obstacle(optimizer), backward_obstacle(optimizer)
    found = {}
    for method in METHODS.values():
        why = sharding if method.is_sharded else in_backward if method.update == "in backward" else None
        why = why if method.name == PLAIN else why or sparse
        if why is not None:
            found[method.name] = why
    return found


def wrap(
    model: torch.nn.Module,
    candidate: Candidate,
    *,
    group: dist.ProcessGroup,
    ddp_options: Mapping[str, Any],
    **more: Any,
) -> DistributedDataParallel:
    """``model`` in DDP with the buckets of ``candidate``."""
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=candidate.bucket_cap_mb, **{**ddp_options, **more}
    )


def build(ddp: DistributedDataParallel, optimizer: Optimizer, candidate: Candidate) -> Optimizer:
    """Register what ``candidate`` stands for with ``ddp``; returns the optimizer for the loop. Call it on every rank.

    Raises:
        ConfigurationError: model or optimizer cannot take it.
    """
    method = METHODS[candidate.method]
    if method.reducer is None and not method.is_sharded:
        return optimizer
    if method.is_sharded:
        zero = sharded(optimizer, ddp.process_group)
        gather = "forward" if method.update == "sharded, gathered in forward" else "backward"
        chain(ZeroStep(zero, gather=gather)).register(ddp)
        return zero
    assert method.reducer is not None
    overlapped = OverlappedOptimizer(optimizer)
    chain(method.reducer(), Step(overlapped, deferred=method.is_deferred or None)).register(ddp)
    return overlapped
