"""Accelerate: ``prepare`` in the place of ``accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.integrations._extras import needs
from overlap.integrations._run import ChainFor, LocalSGDFor, Recipe
from overlap.join import Join

with needs("accelerate"):
    from accelerate import Accelerator

from overlap.integrations._attached import Attached, attach, check_kind

__all__ = ["join_uneven_inputs", "prepare", "remove"]


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *others: Any,
    chain: ChainFor | None = None,
    local_sgd: LocalSGDFor | None = None,
) -> tuple[Any, ...]:
    """As ``accelerator.prepare(model, optimizer, *others)``, with a chain registered.

    ::

        model, optimizer, loader, scheduler = prepare(
            accelerator, model, optimizer, loader, scheduler,
            chain=lambda optimizer: chain(AllReduce(), Step(optimizer)),
        )

    ``accelerator.save_state`` and ``load_state``, which every rank calls, then have all that a rank needs to resume:
    the state of its stages is in a file of its own, ``overlap-rank-0.pt``.

    Args:
        accelerator: of several processes, with DDP.
        model: one that is not in DDP yet.
        optimizer: of its parameters, or a list of several.
        *others: loaders and schedulers.
        chain: a stage that reduces and makes no update, such as ``PowerSGD(rank=4)``, or a list of stages; or a
            function of the optimizers that returns a stage with updates: it is called with an ``OverlappedOptimizer``
            of each, or with a ``ZeroRedundancyOptimizer`` as it is.
        local_sgd: a function of the DDP model and the optimizer that returns a ``LocalSGD``.

    Returns:
        ``(model, optimizer, *others)``, prepared; a list of optimizers as a list.

    Raises:
        ConfigurationError: the accelerator does not use DDP, or does something that a chain cannot follow; and as
            registering does.
    """
    recipe = Recipe(chain, local_sgd)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    check_kind(accelerator)
    ddp, *prepared = accelerator.prepare(model, *optimizers, *others)
    accelerated = prepared[: len(optimizers)]
    run = attach(accelerator, ddp, accelerated, recipe)
    held = accelerated[: len(run.optimizers)] if isinstance(optimizer, (list, tuple)) else accelerated[0]
    return (ddp, held, *prepared[len(optimizers) :])


def remove(accelerator: Accelerator) -> None:
    """Leave all models that were prepared with ``accelerator`` to plain DDP, and their optimizers to Accelerate."""
    attached = Attached.to(accelerator)
    for run in attached.runs:
        attached.detach(run)


@contextmanager
def join_uneven_inputs(
    accelerator: Accelerator, joinables: Sequence[Any], even_batches: bool = False, **options: Any
) -> Iterator[Join]:
    """As ``accelerator.join_uneven_inputs``, with :class:`overlap.Join`, which works on CPUs too.

    ::

        with join_uneven_inputs(accelerator, [model, optimizer, scheduler]) as join:
            for x, y in join.iterate(loader): ...

    Args:
        accelerator: that prepared the loaders.
        joinables: prepared models, optimizers and schedulers.
        even_batches: whether its loaders make all ranks' numbers of batches equal; then there is nothing to join.
        **options: of :class:`overlap.Join`.

    Raises:
        ConfigurationError: gradients are accumulated, which ranks would end at different batches.
    """
    if (steps := accelerator.gradient_accumulation_steps) > 1 and not even_batches:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} with uneven inputs: each rank would step at the end of its own "
            "loader, and not where the others do; use 1, or even_batches=True"
        )
    samplers = [loader.batch_sampler for loader in accelerator._dataloaders if hasattr(loader, "batch_sampler")]
    samplers = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        with Join(joinables, enable=not even_batches, **options) as join:
            yield join
    finally:
        for sampler, value in zip(samplers, before, strict=True):
            sampler.even_batches = value
