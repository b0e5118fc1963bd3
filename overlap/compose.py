"""Composition under PyTorch's names: a hook, then an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, type_name
from overlap.errors import ConfigurationError
from overlap.hooks import Chain, Stage, StageHook, chain
from overlap.hooks.adapters import as_stage, check_hook, hook_name
from overlap.optim import FunctionalOptimizer, Step

__all__ = ["OptimizerHookState", "hook_then_optimizer"]


class OptimizerHookState:
    """The optimizer of :func:`hook_then_optimizer`.

    Args:
        optimizer: a plain ``torch.optim.Optimizer`` or a functional one (backward does everything, the loop calls no
            ``step()``), or an :class:`overlap.optim.OverlappedOptimizer` (the loop calls its ``step()``).
        params: the parameters of ``optimizer``, or for a functional one without parameters those that it is to have;
            ``None``: all. Others of the model keep their averaged ``.grad``.

    Raises:
        ConfigurationError: ``optimizer`` is not an optimizer that can update in backward, or has not just ``params``.

    >>> state = OptimizerHookState(torch.optim.SGD(ddp.parameters(), lr=0.1))
    >>> ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
    >>> loss_fn(ddp(x), y).backward()  # updates, too
    """

    def __init__(self, optimizer: Optimizer | FunctionalOptimizer, params: Iterable[Tensor] | None = None) -> None:
        self.optimizer, self.params = optimizer, as_list(params)
        if params is not None and isinstance(optimizer, FunctionalOptimizer) and optimizer.adopts:
            optimizer.adopt(self.params or ())
            optimizer.adopts = False
        Step(optimizer)  # Raises here, and not where the hook is made.
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if params is not None and (not own or own != set(map(id, self.params or ()))):
            raise ConfigurationError(
                f"params are not the parameters of this {type(optimizer).__name__}: give "
                "OptimizerHookState(torch.optim.SGD(params, lr=0.1)) an optimizer of the parameters to update"
            )


def hook_then_optimizer(hook: Stage | Callable[..., Any], state: OptimizerHookState) -> StageHook:
    """A hook that reduces a bucket with ``hook`` and then updates its parameters, while backward goes on.

    The same as ``chain(hook, Step(state.optimizer))``, in the form that
    ``ddp.register_comm_hook(hook_state, ...)`` takes; ``hook`` gets ``hook_state`` as its state. It serves one
    model, as the optimizer does. Registered with :func:`overlap.register` it also clears gradients before the next
    forward, and knows the model's process group; with DDP itself, call ``zero_grad()`` as ever.

    Args:
        hook: a communication hook or a reducer.
        state: the optimizer and its parameters.

    Raises:
        ConfigurationError: ``hook`` is neither a hook nor a stage, or ``state`` is something else.

    >>> import torch
    >>> from overlap import OptimizerHookState, allreduce_hook, hook_then_optimizer
    >>> layer = torch.nn.Linear(2, 2)
    >>> hook_then_optimizer(allreduce_hook, OptimizerHookState(torch.optim.SGD(layer.parameters(), lr=0.1)))
    <hook hook_then_optimizer(allreduce_hook)>
    """
    if not isinstance(state, OptimizerHookState):
        raise ConfigurationError(
            f"hook_then_optimizer takes an OptimizerHookState, got {type_name(state)}: "
            "hook_then_optimizer(hook, OptimizerHookState(optimizer))"
        )
    check_hook(hook)
    update = Step(state.optimizer)

    def build(hook_state: Any) -> Chain:
        return chain(as_stage(hook, hook_state), update)

    return StageHook(
        build,
        f"hook_then_optimizer({hook_name(hook)})",
        group_of=hook.group_of if isinstance(hook, StageHook) else lambda hook_state: None,
    )
