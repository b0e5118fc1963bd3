"""The chains to choose from: their effect on the result, and how each is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import as_list, is_one_of, short_repr
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import AllReduce, Cast, Int8, PowerSGD, Quantize, Stage, chain
from overlap.optim import OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep
from overlap.optim.declared import check_nothing_before, check_one_eps, check_unit
from overlap.optim.zero.optimizer import check_convertible

_ALLOW = ("exact", "16-bit", "8-bit", "low-rank", "sharded")
_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to reduce and to update."""

    name: str
    kind: str
    """Its effect on gradients; "exact": equal to plain DDP up to the order of a sum."""
    update: Literal["after backward", "in backward", "sharded", "sharded, gathered in forward"]
    reducer: Callable[[], Stage] | None = None
    """``None`` for DDP's own and for the sharded update's."""

    @property
    def is_deferred(self) -> bool:
        """Whether it updates where the loop calls ``step()``, which may clip, scale or skip before that."""
        return self.update == "after backward"

    @property
    def is_sharded(self) -> bool:
        return self.update.startswith("sharded")


_COMPRESSED: tuple[tuple[str, str, Callable[[], Stage]], ...] = (
    ("bf16", "16-bit", lambda: Cast(torch.bfloat16, AllReduce())),
    ("fp16", "16-bit", lambda: Cast(torch.float16, AllReduce())),
    ("int8", "8-bit", lambda: Quantize(Int8())),
    (f"powersgd-{_RANK}", "low-rank", lambda: PowerSGD(rank=_RANK)),
)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="ddp", kind="exact", update="after backward"),
        Method(name="step", kind="exact", update="in backward", reducer=AllReduce),
        Method(name="zero", kind="exact", update="sharded"),
        Method(name="zero-forward", kind="exact", update="sharded, gathered in forward"),
        *(Method(name=name, kind=kind, update="in backward", reducer=make) for name, kind, make in _COMPRESSED),
        *(
            Method(name=f"{name}-deferred", kind=kind, update="after backward", reducer=make)
            for name, kind, make in _COMPRESSED
        ),
    )
}


PLAIN = "ddp"


def allowed(allow: str | Iterable[str], updates: str) -> list[str]:
    """The exact ones, plain DDP first, and those that ``allow`` names.

    Raises:
        ConfigurationError: one of its words is unknown, or rules out another.
    """
    if not is_one_of(updates, "backward", "step"):
        raise ConfigurationError(f"updates={short_repr(updates)} is not 'backward' or 'step'")
    names = [allow] if isinstance(allow, str) or (held := as_list(allow)) is None else held
    for name in names:
        if not is_one_of(name, *_ALLOW):
            raise ConfigurationError(f"allow has {short_repr(name)}; known are {', '.join(_ALLOW)}")
    if updates == "step" and "sharded" in names:
        raise ConfigurationError("allow has 'sharded', which updates in backward, and updates='step': leave one out")
    return [
        one.name
        for one in METHODS.values()
        if one.kind in {"exact", *names}
        and ("sharded" in names or not one.is_sharded)
        and (one.name == PLAIN or one.is_deferred == (updates == "step"))
    ]


def obstacle(method: Method, optimizer: Optimizer) -> str | None:
    """Why ``method`` takes no such optimizer."""
    if method.name == PLAIN:
        return None
    try:
        if not method.is_deferred:
            check_unit(optimizer, instead="updates='step'")
            check_nothing_before(optimizer)
            check_one_eps(optimizer, instead="updates='step'")
        if method.is_sharded:
            check_convertible(optimizer)
    except UnsupportedError as error:
        return str(error)
    return None


def build(ddp: DistributedDataParallel, optimizer: Optimizer, method: Method) -> Optimizer:
    """Register the chain of ``method`` with ``ddp``, on every rank; returns the optimizer for the loop.

    Raises:
        ConfigurationError: model or optimizer cannot take it.
    """
    if method.is_sharded:
        zero = ZeroRedundancyOptimizer.from_optimizer(optimizer, process_group=ddp.process_group, overlap_with_ddp=True)
        gather = "backward" if method.update == "sharded" else "forward"
        chain(ZeroStep(zero, gather=gather)).register(ddp)
        return zero
    if method.reducer is None:
        return optimizer
    overlapped = OverlappedOptimizer(optimizer)
    chain(method.reducer(), Step(overlapped, deferred=method.is_deferred or None)).register(ddp)
    return overlapped
