"""What to give to a chain in place of something that resembles a stage but is not one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._checks import described, told
from overlap._torch import classes

__all__ = ["instead_of", "is_never_a_hook", "shown"]

_MAKE = "make it first"


def shown(thing: object) -> str:
    """``thing`` in a message: as it is typed where that is short, and its class otherwise."""
    typed = told(thing)
    is_typed = len(typed) <= 40 and "\n" not in typed and " at 0x" not in typed and not isinstance(thing, type)
    return typed if is_typed else described(thing)


def is_never_a_hook(thing: object) -> bool:
    """Whether ``thing`` can be called with two arguments and is yet known to be something else."""
    return isinstance(thing, nn.Module | type) or isinstance(getattr(thing, "__self__", None), Optimizer)


def instead_of(thing: object) -> str:
    """What the user meant, with the call that does it.

    Args:
        thing: neither a stage nor a hook.
    """
    if isinstance(thing, type):
        return _instead_of_class(thing)
    if isinstance(thing, LRScheduler):
        return "a scheduler stays in the loop: call its step() after the optimizer's"
    if (update := _update_with(thing)) is not None:
        return update
    if isinstance(thing, nn.Module):
        return "a chain is registered with the model: chain(...).register(ddp)"
    if isinstance(thing, classes.PowerSGDState):
        return "give the hook with its state: as_stage(powerSGD_hook, state), or PowerSGD(rank=...), which has no state"
    if isinstance(thing, classes.PostLocalSGDState):
        return "give the hook with its state: as_stage(post_localSGD_hook, state)"
    if isinstance(thing, classes.ModelAverager) or _is_ours(thing, "ModelAverager"):
        return "an averager acts after the optimizer's step: PostLocalSGDOptimizer(optimizer, averager)"
    if isinstance(thing, tuple) and len(thing) == 2 and callable(thing[0]) and not callable(thing[1]):
        return "a hook with its state is as_stage(hook, state)"
    if isinstance(thing, list | tuple):
        return "give stages one by one: chain(*stages)"
    return (
        "a stage is an overlap.Stage or a function of one bucket; a DDP communication hook becomes one with "
        "overlap.hooks.as_stage(hook, state)"
    )


def _update_with(thing: Any) -> str | None:
    """The stage that updates with ``thing``, if it is some kind of optimizer."""
    optimizer = getattr(thing, "__self__", thing)  # Its step().
    if isinstance(optimizer, classes.ZeroRedundancyOptimizer):
        if not _is_ours(optimizer, "ZeroRedundancyOptimizer"):
            return "use overlap.ZeroRedundancyOptimizer, and give ZeroStep(zero)"
        return "its update is the stage ZeroStep(zero), as in chain(ZeroStep(zero))"
    if isinstance(optimizer, classes.PostLocalSGDOptimizer) or _is_ours(optimizer, "AveragingOptimizer"):
        return "it averages in its own step(), which the loop calls: leave it out of the chain"
    if _is_ours(optimizer, "OptimizerHookState"):
        return "its update is the stage state.stage(); or use hook_then_optimizer(hook, state)"
    is_wrapper = isinstance(getattr(optimizer, "optimizer", None), Optimizer) and hasattr(optimizer, "step")
    if isinstance(optimizer, Optimizer) or is_wrapper or _is_ours(optimizer, "FunctionalOptimizer"):
        return "an optimizer's update is the stage Step(optimizer), as in chain(AllReduce(), Step(optimizer))"
    return None


def _instead_of_class(cls: type) -> str:
    if issubclass(cls, classes.ZeroRedundancyOptimizer):
        return f"{_MAKE}: ZeroStep({cls.__name__}(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True))"
    if issubclass(cls, Optimizer) and not issubclass(cls, Joinable):
        return f"{_MAKE}: Step({cls.__name__}(ddp.parameters(), ...))"
    return f"{_MAKE}: {cls.__name__}(...)"


def _is_ours(thing: object, name: str) -> bool:
    """Whether ``thing`` is of a class of this library that modules of stages do not know."""
    return any(cls.__name__ == name and cls.__module__.startswith("overlap.") for cls in type(thing).__mro__)
