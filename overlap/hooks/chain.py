"""Stages one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from overlap.errors import ConfigurationError
from overlap.hooks.adapters import stage_from
from overlap.hooks.bucket import Bucket
from overlap.hooks.engine.registration import Registration, register
from overlap.hooks.stage import Stage

__all__ = ["Chain", "chain"]


class Chain(Stage):
    """Stages that run one after another on each bucket; made by :func:`chain`."""

    def __init__(self, *stages: Stage) -> None:
        self.stages = stages
        self.role = stages[-1].role

    @property
    def sequence(self) -> tuple[Stage, ...]:
        return self.stages

    @property
    def children(self) -> tuple[Stage, ...]:
        return self.stages

    @property
    def starts_on_autograd_thread(self) -> bool:
        return self.stages[0].starts_on_autograd_thread

    async def __call__(self, bucket: Bucket) -> None:
        for stage in self.stages:
            try:
                await stage(bucket)
            except Exception as error:
                # Reached where a chain is part of another stage; a chain's own stages are run one by one.
                error.add_note(f"raised in stage {stage!r}")
                raise
            bucket = stage.passed(bucket)

    def register(self, ddp: DistributedDataParallel) -> Registration:
        """Run this chain on the gradients of ``ddp``; see :func:`overlap.register`."""
        return register(ddp, self)

    def state_dict(self) -> dict[str, Any]:
        """The state of each stage on this rank, by its place in the chain."""
        states = {str(place): stage.state_dict() for place, stage in enumerate(self.stages)}
        return {place: state for place, state in states.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` of a chain of the same stages returned."""
        places = {str(place) for place in range(len(self.stages))}
        if unknown := sorted(set(state_dict) - places):
            raise ConfigurationError(f"state of stages {unknown} for a chain of {len(self.stages)} stages: {self!r}")
        for place, stage in enumerate(self.stages):
            stage.load_state_dict(state_dict.get(str(place), {}))

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.stages))})"


def chain(*stages: Stage | Callable[..., Any]) -> Chain:
    """One stage made of several: a reducer, then at most one update, then at most one averager.

    Args:
        stages: stages, ``async`` callables of a bucket, or DDP communication hooks ``(state, bucket) -> Future``
            (called with ``None`` as their state; for another state pass ``as_stage(hook, state)``). The stages of a
            chain are taken one by one.

    Raises:
        ConfigurationError: something is not a stage, or the stages are not in this order.

    >>> from overlap import AllReduce, chain
    >>> chain(AllReduce())
    chain(AllReduce())
    """
    flat: list[Stage] = []
    for stage in map(stage_from, stages):
        flat.extend(stage.stages if isinstance(stage, Chain) else [stage])
    if not flat:
        raise ConfigurationError("chain() needs at least one stage, such as chain(AllReduce(), Step(optimizer))")
    for before, after in itertools.pairwise(flat):
        if before.role >= after.role:
            raise ConfigurationError(
                f"{after!r} ({after.role.name.lower()}) cannot follow {before!r} ({before.role.name.lower()}): "
                "a chain is one reducer, then at most one update, then at most one averager"
            )
    if not flat[0].reduces:
        raise ConfigurationError(
            f"{flat[0]!r} needs a reducer before it, or every rank would use its own gradients: "
            f"chain(AllReduce(), {flat[0]!r})"
        )
    return Chain(*flat)
