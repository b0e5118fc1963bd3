"""Ways to train a DDP model: stages or a hook are registered, and an update is made for the loop to step.

A recipe is a function of the model and the optimizer to use; every measurement takes its own from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap import (
    AllReduce,
    LocalSGD,
    OverlappedOptimizer,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)  # fmt: skip


@dataclass(frozen=True)
class Maker:
    """An optimizer's class and options."""

    kind: type[Optimizer]
    options: dict[str, Any]

    def __call__(self, parameters: Iterable[Tensor]) -> Optimizer:
        return self.kind(parameters, **self.options)


@dataclass(frozen=True, kw_only=True)
class Update:
    """The loop's side of a recipe: it calls `clear`, then forward and backward, then `step`."""

    # Stepped in this order.
    optimizers: tuple[Any, ...] = ()
    # Clears the gradients; a registered chain does that by itself.
    clear: Callable[[], None] = lambda: None
    # Waits for the work that steps have left in flight.
    finish: Callable[[], None] = lambda: None

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


Recipe = Callable[[DistributedDataParallel, Maker], Update]


def stepped_by_loop(optimizer: Any) -> Update:
    """The loop that everyone writes: zero, forward, backward, step."""
    return Update(optimizers=(optimizer,), clear=optimizer.zero_grad)


def plain(ddp: DistributedDataParallel, make: Maker) -> Update:
    """DDP reduces, then the optimizer steps."""
    return stepped_by_loop(make(ddp.parameters()))


def torch_hook(hook: Any, state: Callable[[dist.ProcessGroup], object] = lambda group: group) -> Recipe:
    """One of PyTorch's communication hooks, with the optimizer after backward as PyTorch has it."""

    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        ddp.register_comm_hook(state(ddp.process_group), hook)
        return plain(ddp, make)

    return recipe


def torch_powersgd(ddp: DistributedDataParallel, make: Maker) -> Update:
    """Of rank 4, from its earliest start on: compressed from the third step on."""

    def state(group: dist.ProcessGroup) -> object:
        return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)

    return torch_hook(powerSGD_hook.powerSGD_hook, state)(ddp, make)


def torch_hook_then_optimizer(ddp: DistributedDataParallel, make: Maker) -> Update:
    """PyTorch's update in backward, by its functional optimizers, which have no fused form."""
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as hooks
    from torch.distributed.optim import as_functional_optim

    options = {name: value for name, value in make.options.items() if name not in ("fused", "foreach")}
    state = hooks._OptimizerHookState(as_functional_optim(make.kind, **options))
    ddp.register_comm_hook(None, hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    return Update(clear=ddp.zero_grad)


def torch_zero(ddp: DistributedDataParallel, make: Maker) -> Update:
    """PyTorch's sharded optimizer after backward."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    return stepped_by_loop(TorchZero(ddp.parameters(), make.kind, process_group=ddp.process_group, **make.options))


def reduced(make_reducer: Callable[[], Stage]) -> Recipe:
    """A chain that only reduces; the loop steps the optimizer."""

    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        chain(make_reducer()).register(ddp)
        return stepped_by_loop(make(ddp.parameters()))

    return recipe


def stepped(reducer: Callable[[], Stage] = AllReduce, **options: Any) -> Recipe:
    """`chain(reducer(), Step(..., **options))`."""

    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        optimizer = OverlappedOptimizer(make(ddp.parameters()))
        chain(reducer(), Step(optimizer, **options)).register(ddp)
        return Update(optimizers=(optimizer,))

    return recipe


def sharded(*, partition: str | None = None, **options: Any) -> Recipe:
    """`chain(ZeroStep(..., **options))`."""

    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(),
            make.kind,
            process_group=ddp.process_group,
            overlap_with_ddp=True,
            partition=partition,
            **make.options,
        )
        chain(ZeroStep(zero, **options)).register(ddp)
        return Update(optimizers=(zero,), finish=zero.wait)

    return recipe


def local_sgd(*, period: int, start_step: int, **options: Any) -> Recipe:
    """`LocalSGD`: parameters are averaged once in a period."""

    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        optimizer = make(ddp.parameters())
        return stepped_by_loop(LocalSGD(ddp, optimizer, period=period, start_step=start_step, **options))

    return recipe
