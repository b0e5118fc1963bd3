"""Accelerate: ``prepare`` in the place of ``accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from overlap._torch.optimizer import unwrapped
from overlap.errors import ConfigurationError
from overlap.integrations._common import Attachment, ChainFor, LocalSGDFor, Recipe, load_files, needs, save_files

with needs("accelerate"):
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import patch_optimizer_step
    from accelerate.utils import DDPCommunicationHookType

__all__ = ["prepare", "remove"]

_ATTACHED = "_overlap_attached"


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
        local_sgd: a function of the DDP model and the optimizer that returns a ``LocalSGD``, such as
            ``functools.partial(LocalSGD, period=8)``.

    Returns:
        ``(model, optimizer, *others)``, prepared; a list of optimizers as a list.

    Raises:
        ConfigurationError: the accelerator does not use DDP, or does something that a chain cannot follow; and as
            registering does.
    """
    recipe = Recipe(chain, local_sgd)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    attached = Attached.for_accelerator(accelerator)
    ddp, *prepared = accelerator.prepare(model, *optimizers, *others)
    accelerated = prepared[: len(optimizers)]
    run = attached.carry_out(recipe, ddp, accelerated)
    held = accelerated[: len(run.optimizers)] if isinstance(optimizer, (list, tuple)) else accelerated[0]
    return (ddp, held, *prepared[len(optimizers) :])


def remove(accelerator: Accelerator) -> None:
    """Leave all models that were prepared with ``accelerator`` to plain DDP, and their optimizers to Accelerate."""
    attached = Attached.for_accelerator(accelerator)
    for run in attached.runs:
        attached.detach(run)


class Attached:
    """The runs of one accelerator, which then clips, saves and loads for them."""

    def __init__(self, accelerator: Accelerator) -> None:
        _check_kind(accelerator)
        self._accelerator = accelerator
        self._holders: dict[Attachment, list[Any]] = {}
        self._folder = ""
        self._clip, self._load = accelerator.clip_grad_norm_, accelerator.load_state
        accelerator.clip_grad_norm_ = self._clip_grad_norm
        accelerator.load_state = self._load_state
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._note_folder)

    @classmethod
    def for_accelerator(cls, accelerator: Accelerator) -> Attached:
        """That of ``accelerator``, made at the first call."""
        kept: dict[str, Any] = vars(accelerator)
        if _ATTACHED not in kept:
            kept[_ATTACHED] = cls(accelerator)
        attached: Attached = kept[_ATTACHED]
        return attached

    @property
    def runs(self) -> list[Attachment]:
        return list(self._holders)

    def carry_out(
        self, recipe: Recipe, model: nn.Module, accelerated: Sequence[Any], *, late: str = "", instead: str = ""
    ) -> Attachment:
        """Register for a prepared model, whose ``accelerated`` optimizers then step the registered ones.

        ``late`` and ``instead`` are those of :class:`Attachment`; a scaler's are known here.
        """
        self.detach_freed(also=accelerated)
        if not late and self._accelerator.scaler is not None:
            late, instead = "mixed_precision='fp16' decides after backward whether to step", ", or 'bf16'"
        run = Attachment(recipe, model, [unwrapped(one) for one in accelerated], late=late, instead=instead)
        self._holders[run] = list(accelerated)
        for outer, inner in zip(accelerated, run.optimizers, strict=True):
            _put_in(outer, inner)
            if outer.scaler is not None and run.has_updates:
                outer.step = _step_that_tells_of_skips(outer)
        return run

    def detach(self, run: Attachment) -> None:
        holders = self._holders.pop(run)
        run.remove()
        for outer, inner, given in zip(holders, run.optimizers, run.given, strict=True):
            if outer.optimizer is inner:
                _put_in(outer, given)
                vars(outer).pop("step", None)

    def detach_freed(self, *, also: Sequence[Any] = ()) -> None:
        """Detach the runs of optimizers that ``accelerator.free_memory()`` has let go, ``also`` those of these."""
        kept = set(map(id, self._accelerator._optimizers)) - set(map(id, also))
        for run, holders in list(self._holders.items()):
            if kept.isdisjoint(map(id, holders)):
                self.detach(run)

    def _clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """``accelerator.clip_grad_norm_``; gradients of a divided optimizer are clipped by its own method."""
        wanted = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        asked = {id(parameter) for parameter in wanted if parameter.requires_grad}
        updating = [run for run in self.runs if run.updates and not asked.isdisjoint(map(id, run.ddp.parameters()))]
        sharded = [zero for run in updating for zero in run.sharded]
        if not sharded:
            if max_norm == float("inf") and any(run.updates_in_backward for run in updating):
                return get_total_norm([one.grad for one in wanted if one.grad is not None], norm_type)  # Read-only.
            return self._clip(wanted, max_norm, norm_type)
        covered = {id(parameter) for group in sharded[0].param_groups for parameter in group["params"]}
        if len(sharded) > 1 or asked != covered:
            raise ConfigurationError(
                "clip_grad_norm_ of a divided optimizer takes all of its parameters, and no others: give them, or use "
                "ClipGradNorm in the chain"
            )
        self._accelerator.unscale_gradients()
        return sharded[0].clip_grad_norm_(max_norm, norm_type)

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        self.detach_freed()
        save_files(folder, self._accelerator.process_index, self.runs)
        for run in self.runs:
            run.consolidate()  # Last: any use of a divided state makes it be gathered anew.

    def _note_folder(self, models: Any, folder: str) -> None:
        self._folder = folder

    def _load_state(self, *args: Any, **kwargs: Any) -> Any:
        """``accelerator.load_state``, and then the state of stages, since Accelerate calls its own load hooks first."""
        result = self._load(*args, **kwargs)
        self.detach_freed()
        load_files(self._folder, self._accelerator.process_index, self.runs)
        return result


def _check_kind(accelerator: Accelerator) -> None:
    """Raises: ConfigurationError: it does not use DDP, or has a communication hook of its own."""
    kind = accelerator.distributed_type
    if not (kind == DistributedType.MULTI_CPU or accelerator.multi_device):
        raise ConfigurationError(
            f"a chain needs DistributedDataParallel, and this accelerator's distributed_type is {kind.value}: start "
            "several processes, with torchrun or accelerate launch, without FSDP and DeepSpeed"
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ConfigurationError(
            f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook.value!r}) and a chain both decide what "
            "happens to gradients: leave comm_hook out, and put its stage into the chain, such as Cast(torch.float16)"
        )


def _put_in(outer: Any, optimizer: Any) -> None:
    """Have Accelerate's ``outer`` step ``optimizer``."""
    outer.optimizer = optimizer
    if outer.scaler is not None:
        outer._optimizer_original_step_method = optimizer.step
        outer._optimizer_patched_step_method = patch_optimizer_step(outer, optimizer.step)


def _step_that_tells_of_skips(outer: Any) -> Callable[..., None]:
    """``outer.step``, after which ``outer.step_was_skipped`` is right.

    Accelerate looks whether the scaler has called the optimizer's ``step``. It always calls ours, which checks itself
    whether gradients are finite.
    """
    step = outer.step

    @wraps(step)
    def telling_step(closure: Callable[[], Any] | None = None) -> None:
        before = outer.scaler.get_scale()
        step(closure)
        if outer.gradient_state.sync_gradients:
            outer._is_overflow = outer.scaler.get_scale() < before

    return telling_step
