"""Lightning: ``Trainer(strategy=OverlapStrategy(chain=...))``, its DDP strategy with a chain, on CPUs too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from overlap._torch.optimizer import unwrapped
from overlap.errors import ConfigurationError, OverlapError
from overlap.hooks import AllReduce, Stage
from overlap.hooks import chain as chain_of
from overlap.integrations._common import Attachment, ChainFor, LocalSGDFor, Recipe, needs
from overlap.optim import Step
from overlap.resume.train_state import remembers

with needs("lightning"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType

__all__ = ["OverlapStrategy"]

_KEY = "overlap"


class OverlapStrategy(DDPStrategy):
    """``DDPStrategy`` whose gradients go through a chain; where its updates are made in backward, so are the trainer's.

    ::

        strategy = OverlapStrategy(chain=lambda optimizer: chain(AllReduce(), Step(optimizer)))
        Trainer(strategy=strategy, devices=2, accelerator="cpu").fit(module)

    The name ``Trainer(strategy="overlap")`` is that strategy, once this module is imported.

    Where the trainer clips (``gradient_clip_val``) or scales (``precision="16-mixed"``), interleaved updates of the
    chain are deferred.

    If stages have state, the trainer's checkpoint has that of each rank under ``"overlap"``; the rest of it is
    unchanged.

    Args:
        chain, local_sgd: as of :func:`overlap.integrations.accelerate.prepare`, with the optimizers of
            ``configure_optimizers``.
        **options: of ``DDPStrategy`` and ``DistributedDataParallel``.

    Raises:
        ConfigurationError: ``chain`` or ``local_sgd`` is something else; and in ``fit``, where the trainer
            clips or scales, and an update of the chain cannot be left to ``step()``.
    """

    strategy_name = "overlap"

    def __init__(
        self,
        *,
        chain: ChainFor | None = None,
        local_sgd: LocalSGDFor | None = None,
        **options: Any,
    ) -> None:
        if hooks := sorted(set(options) & {"ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}):
            raise ConfigurationError(
                f"{hooks[0]} and a chain both decide what happens to gradients: put the hook into the chain, "
                "as_stage(hook, state); post-local SGD is local_sgd=functools.partial(LocalSGD, period=8)"
            )
        super().__init__(**options)
        self._recipe = Recipe(chain, local_sgd)
        self._run: Attachment | None = None
        self._last: dict[str, Any] | None = None
        """This rank's state at the end of a fit, for a checkpoint after it."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.optimizers: list[Any]
        if trainer.state.fn != TrainerFn.FITTING:
            return
        # The trainer's use of gradients after backward, and how else a user can have it than by a deferred update.
        late = instead = ""
        if clip := trainer.gradient_clip_val:
            late = f"gradient_clip_val={clip} clips after backward"
            instead = f", or leave gradient_clip_val out and put ClipGradNorm({clip}) into the chain"
        elif self._scaler is not None:
            late, instead = "precision='16-mixed' decides after backward whether to step", ", or 'bf16-mixed'"
        self._last = None
        self._run = Attachment(self._recipe, self.model, self.optimizers, late=late, instead=instead)
        self.optimizers = self._run.optimizers
        if self._run.has_updates:
            self.precision_plugin.clip_gradients = self._clip

    @property
    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    def teardown(self) -> None:
        if self._run is not None and self._run.registration is not None:  # The end of a fit, not of a test after it.
            with suppress(OverlapError):  # After a failure there is nothing to save.
                self._last = self._run.state.rank_state_dict()
            self._run.remove()
            self.precision_plugin.__dict__.pop("clip_gradients", None)
        super().teardown()

    def _clip(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """``clip_gradients`` of the precision plugin, for optimizers that ``step()`` unscales, and divided ones."""
        assert self._run is not None
        if clip_val <= 0:
            return
        inner = unwrapped(optimizer)
        if self._scaler is not None and getattr(inner, "_step_supports_amp_scaling", False):
            self._scaler.unscale_(inner)
        is_divided = any(inner is zero for zero in self._run.sharded) and not all(
            update.has_whole_mean for update in inner.updates
        )
        if gradient_clip_algorithm == GradClipAlgorithmType.NORM and is_divided:
            inner.clip_grad_norm_(clip_val)  # In the model's order; whole gradients are clipped in the optimizer's.
            return
        Precision.clip_gradients(self.precision_plugin, optimizer, clip_val, gradient_clip_algorithm)

    # Checkpoints.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._run is not None and "optimizer_states" in checkpoint:  # Not one of weights alone.
            module: Any = self.lightning_module
            if module.trainer.interrupted or Path(filepath).name.startswith("hpc_ckpt_"):
                # After an exception, or at Slurm's signal: the other ranks may be elsewhere, and would not take part.
                warnings.warn(
                    "this checkpoint was saved because of an exception or a signal, without the state of stages, and "
                    "perhaps in the middle of a step: a run that resumes from it may differ from an uninterrupted one; "
                    "checkpoints of ModelCheckpoint are complete",
                    stacklevel=2,
                )
            elif remembers(own := self._run.state.rank_state_dict() if self._last is None else self._last):
                checkpoint = {**checkpoint, **(self._run.state.gathered(own) or {})}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        own = {_KEY: checkpoint[_KEY]} if _KEY in checkpoint else None
        if self._run is None or not (self._run.is_local and own):  # That of rank 0, where each has its own.
            super().load_optimizer_state_dict(checkpoint)
        if self._run is None:
            return
        try:
            if own is None:
                self._run.state.forget()
            else:
                self._run.state.load_state_dict(own)
        except ConfigurationError as error:
            error.add_note(f"delete checkpoint[{_KEY!r}] to start stages without their state")
            raise


def _updated_in_backward(*optimizers: Any) -> Stage:
    return chain_of(AllReduce(), *map(Step, optimizers))


StrategyRegistry.register("overlap", OverlapStrategy, override=True, chain=_updated_in_backward)
