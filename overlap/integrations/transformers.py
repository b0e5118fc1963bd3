"""The HF Trainer: ``OverlapTrainer``, or ``OverlapMixin`` before a ``Trainer`` of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.integrations._common import ChainFor, LocalSGDFor, Recipe, Run, load_files, needs, save_files
from overlap.optim import ZeroRedundancyOptimizer

with needs("transformers"):
    from transformers import Trainer, TrainerCallback

from overlap.integrations.accelerate import Attached, attach

__all__ = ["OverlapCallback", "OverlapMixin", "OverlapTrainer"]


class OverlapMixin:
    """A chain, local SGD or ZeRO in a Trainer: ``class MyTrainer(OverlapMixin, Trainer)``.

    ::

        OverlapTrainer(model, args, train_dataset=data, chain=lambda optimizer: chain(AllReduce(), Step(optimizer)))

    Where the Trainer clips (``max_grad_norm`` is 1.0 by default) or scales (``fp16=True``), interleaved updates of the
    chain are deferred; ``max_grad_norm=0`` and ``ClipGradNorm(1.0)`` clip in the chain.

    If stages have state, a checkpoint has an additional file for each rank, ``overlap-rank-0.pt``.

    Args:
        chain: a stage that reduces and makes no update, such as ``PowerSGD(rank=4)``, or a list of stages; or a
            function of the optimizer that returns a stage with an update: it is called with an ``OverlappedOptimizer``,
            or with the ``ZeroRedundancyOptimizer``.
        local_sgd: a function of the DDP model and the optimizer that returns a ``LocalSGD``.
        zero: divide the state of the Trainer's optimizer among the ranks: ``True``, or options of
            ``ZeroRedundancyOptimizer.from_optimizer``.
        *args, **kwargs: the Trainer's.

    Raises:
        ConfigurationError: an argument is something else; and in ``train()``, where the Trainer clips by
            ``max_grad_norm`` or scales, and an update of the chain cannot be left to ``step()``.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        chain: ChainFor | None = None,
        local_sgd: LocalSGDFor | None = None,
        zero: bool | Mapping[str, Any] = False,
        **kwargs: Any,
    ) -> None:
        if zero and local_sgd is not None:
            raise ConfigurationError("zero and local_sgd were both given: local SGD keeps the whole state on each rank")
        self.overlap_recipe = Recipe(chain, local_sgd)
        self.overlap_run: Run | None = None
        """What is registered, during ``train()``."""
        self.overlap_resume: str | None = None
        """The checkpoint that ``train()`` resumes from, until it is loaded."""
        self._zero = {} if zero is True else dict(zero) if zero else None
        super().__init__(*args, **kwargs)
        self.add_callback(OverlapCallback(self))  # type: ignore[attr-defined]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        is_new = self.optimizer is None
        optimizer: Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_new and self._zero is not None:
            optimizer = ZeroRedundancyOptimizer.from_optimizer(optimizer, **self._zero)
        self.optimizer = optimizer
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        run = self.overlap_run
        if run is not None:
            run.consolidate()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if run is not None:
            save_files(output_dir, self.args.process_index, [run])  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        self.overlap_resume = checkpoint

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm that is logged; none where gradients cannot be read."""
        run = self.overlap_run
        if grad_norm is None and run is not None and run.hides_gradients:
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]


class OverlapCallback(TrainerCallback):
    """Registers the chain when training begins, when model and optimizer are prepared, and removes it at the end."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        resume, trainer.overlap_resume = trainer.overlap_resume, None
        if trainer.overlap_recipe == Recipe():
            return
        norm = args.max_grad_norm
        run = trainer.overlap_run = attach(
            trainer.accelerator,
            trainer.model_wrapped,
            [trainer.optimizer],
            trainer.overlap_recipe,
            late=f"max_grad_norm={norm} clips after backward" if norm else "",
            instead=f", or give max_grad_norm=0 and put ClipGradNorm({norm}) into the chain",
        )
        if resume is not None:
            load_files(resume, args.process_index, [run])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        run, trainer.overlap_run = trainer.overlap_run, None
        if run is not None:
            Attached.to(trainer.accelerator).detach(run)


class OverlapTrainer(OverlapMixin, Trainer):
    """The Trainer with :class:`OverlapMixin`."""
