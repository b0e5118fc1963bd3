"""Stages one after another, and registering them with a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from overlap._checks import check_ddp, check_group
from overlap._torch.ddp import is_sharded, replicated_by, uncompiled
from overlap._torch.private import FSDP_USES, check_private_parts
from overlap.errors import ConfigurationError, OverlapError, RegistrationError, hide_internal_frames
from overlap.hooks.adapters import as_stage
from overlap.hooks.bucket import Bucket
from overlap.hooks.engine.registration import Registration, register_ddp
from overlap.hooks.stage import Role, Stage, updates_of
from overlap.hooks.transforms.transform import Transform


class Chain(Stage):
    """Stages that run one after another on each bucket; made by :func:`chain`.

    >>> stages = chain(AllReduce(), ClipGradNorm(1.0))
    >>> isinstance(stages, Chain), len(stages.sequence)
    (True, 2)
    >>> registration = stages.register(ddp)
    """

    def __init__(self, *stages: Stage) -> None:
        self.children = stages
        self.role = max(stage.role for stage in stages)

    @property
    def sequence(self) -> tuple[Stage, ...]:
        return self.children

    async def __call__(self, bucket: Bucket) -> None:
        for stage in self.children:
            try:
                await stage(bucket)
            except Exception as error:
                # Reached where a chain is part of another stage; a chain's own stages are run one by one.
                error.add_note(f"raised in stage {stage!r}")
                raise
            bucket = stage.output_bucket(bucket)

    def register(self, model: nn.Module, *, group: dist.ProcessGroup | None = None) -> Registration:
        """Run this chain on the gradients of ``model``; see :func:`overlap.register`."""
        return register(model, self, group=group)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.children))})"


def chain(*stages: Stage | Callable[..., Any]) -> Chain:
    """One stage made of several: ``transform* reducer transform* update* transform* averager?``.

    One *reducer* turns this rank's gradients into their mean, any number of *updates* make new parameters of it, each
    of its own parameters, and at most one *averager* acts on those. A *transform* neither reduces nor updates and may
    stand anywhere: before the reducer it sees this rank's own gradients, after it the mean, after an update the new
    parameters. Where the first is an update that reduces by itself (``ZeroStep``) and another stage needs the mean as
    well, the chain gets that update's reduction as a stage of its own (``ReduceScatter``).

    Args:
        stages: stages, functions of a bucket (plain or ``async``; transforms, unless :func:`reducer` marks them), or
            DDP communication hooks ``(state, bucket) -> Future`` (called with ``None`` as their state; for another
            state pass ``as_stage(hook, state)``). The stages of a chain are taken one by one.

    Raises:
        ConfigurationError: something is not a stage, or the stages are not in this order.

    >>> from overlap import AllReduce, chain
    >>> chain(AllReduce())
    chain(AllReduce())
    """
    flat: list[Stage] = []
    for stage in map(as_stage, stages):
        flat.extend(stage.sequence)
    if not flat:
        raise ConfigurationError("chain() needs at least one stage, such as chain(AllReduce(), Step(optimizer))")
    flat = _with_reducer(flat)
    _check_roles([stage for stage in flat if stage.role is not Role.TRANSFORM], flat)
    return Chain(*flat)


def _with_reducer(stages: list[Stage]) -> list[Stage]:
    """``stages`` with the reduction of an update that reduces by itself before the first that needs the mean."""
    first = next((position for position, stage in enumerate(stages) if stage.role is not Role.TRANSFORM), len(stages))
    updates = updates_of(stages)
    transforms = enumerate(stages[:first])
    needing = next((position for position, one in transforms if isinstance(one, Transform) and one.needs_mean), first)
    is_first_alone = len(updates) == 1 and needing == first
    if not updates or stages[first].role is not Role.UPDATE or is_first_alone:
        return stages
    reducer = next((made for update in updates if (made := update.reducer_for(updates)) is not None), None)
    return stages if reducer is None else [*stages[:needing], reducer, *stages[needing:]]


def _check_roles(acting: Sequence[Stage], whole: Sequence[Stage]) -> None:
    """Raises: ConfigurationError: stages that are no transforms are out of order, or there is no reducer."""
    for before, after in itertools.pairwise(acting):
        if before.role > after.role or before.role is after.role is not Role.UPDATE:
            in_order = iter(sorted(acting, key=lambda stage: stage.role))
            ordered = ", ".join((stage if stage.role is Role.TRANSFORM else next(in_order)).as_code for stage in whole)
            remedy = "leave one of the two out" if before.role is after.role else f"write chain({ordered})"
            raise ConfigurationError(
                f"{after!r} ({after.role.name.lower()}) cannot follow {before!r} ({before.role.name.lower()}): a chain "
                f"is one reducer, then updates, then at most one averager, with transforms anywhere; {remedy}"
            )
    if not acting or not acting[0].reduces:
        remedy = ", ".join(["AllReduce()", *(stage.as_code for stage in whole)])
        missing = f"{acting[0]!r} needs a reducer before it" if acting else f"{whole[0]!r}: no stage here reduces"
        raise ConfigurationError(
            f"{missing}, so every rank would use its own gradients. Write chain({remedy}); a function that reduces is "
            "marked with @overlap.reducer"
        )


def register(
    model: nn.Module,
    stage: Stage | Callable[..., Any],
    state: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Registration:
    """Run ``stage`` on the gradients of ``model``, in place of its own all-reduce.

    Every rank of the model's process group must call this, before a backward and in the same order with its other
    collective calls. On CPU tensors with Gloo it opens separate connections to the ranks of the group; on an
    accelerator stages use the group itself. It warns where ``CUDA_DEVICE_MAX_CONNECTIONS=1`` puts all streams of a GPU
    into one queue. Ranks that register several models of one layout do so in the same order.

    With FSDP2 the stage is a reducer, which makes the mean over the replicas of each shard: on the replicate dimension
    of a 2-D mesh (HSDP), for PyTorch's ``replicate``, or over ``group``. See docs/guides/sharded-models.md.

    Args:
        model: a ``DistributedDataParallel`` model, compiled or not, or the root that ``fully_shard`` or ``replicate``
            was called with.
        stage: a stage or chain, a function of a bucket, or a hook ``(state, bucket) -> Future[Tensor]``.
        state: the first argument of a hook; ``None`` for a stage.
        group: only for a model that ``fully_shard`` shards over a 1-D mesh: the ranks that have the same shard.

    Returns:
        The registration. It lasts as long as the model and need not be kept.

    Raises:
        RegistrationError: the model already has a hook, or cannot take one.
        ConfigurationError: ``stage`` is not a stage, has no reducer, or refuses the model.
        PeerError: another rank raised one of these.
        CollectiveError: another rank registers something else, or does not arrive.

    >>> registration = overlap.register(ddp, fp16_compress_hook)
    >>> loss_fn(ddp(x), y).backward()
    >>> registration.remove()
    """
    try:
        module: Any = uncompiled(model)
        if is_sharded(module):
            check_private_parts(FSDP_USES)
            from overlap.hooks.meshes import register_replicas  # It imports FSDP, which takes a second.

            return register_replicas(module, stage, state, check_group("group", group))
        if group is not None:
            raise RegistrationError(
                "group= is for a model that fully_shard shards over a 1-D mesh: leave it out, and give "
                "DistributedDataParallel(model, process_group=group)"
            )
        if (ddp := replicated_by(module)) is not None:
            return register_ddp(ddp, stage, state, called=module)
        return register_ddp(check_ddp(model, error=RegistrationError), stage, state)
    except OverlapError as error:
        hide_internal_frames(error)
        raise
