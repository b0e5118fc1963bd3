"""The HF Trainer: ``OverlapTrainer``, or ``OverlapMixin`` before a ``Trainer`` of one's own."""

from __future__ import annotations

from typing import Any

from overlap.integrations._common import Attachment, ChainFor, LocalSGDFor, Recipe, load_files, needs, save_files

with needs("transformers"):
    from transformers import Trainer, TrainerCallback

from overlap.integrations.accelerate import Attached

__all__ = ["OverlapCallback", "OverlapMixin", "OverlapTrainer"]


class OverlapMixin:
    """A chain, local SGD or ZeRO in a Trainer: ``class MyTrainer(OverlapMixin, Trainer)``.

    ::

        OverlapTrainer(model, args, train_dataset=data, chain=lambda optimizer: chain(AllReduce(), Step(optimizer)))

    Where the Trainer clips (``max_grad_norm`` is 1.0 by default) or scales (``fp16=True``), interleaved updates of the
    chain are deferred; ``max_grad_norm=0`` and ``ClipGradNorm(1.0)`` clip in the chain.

    If stages have state, a checkpoint has an additional file for each rank, ``overlap-rank-0.pt``.

    A sharded update needs a sharded optimizer; the Trainer makes it with its own groups of parameters::

        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        sharded = ZeroRedundancyOptimizer, {"optimizer_class": kind, **options}
        OverlapTrainer(model, args, optimizer_cls_and_kwargs=sharded, chain=lambda zero: chain(ZeroStep(zero)))

    Args:
        chain, local_sgd: as of :func:`overlap.integrations.accelerate.prepare`.
        *args, **kwargs: the Trainer's.

    Raises:
        ConfigurationError: an argument is something else; and in ``train()``, where the Trainer clips by
            ``max_grad_norm`` or scales, and an update of the chain cannot be left to ``step()``.
    """

    def __init__(
        self, *args: Any, chain: ChainFor | None = None, local_sgd: LocalSGDFor | None = None, **kwargs: Any
    ) -> None:
        self.overlap_recipe = Recipe(chain, local_sgd)
        self.overlap_run: Attachment | None = None
        """The registered chain, during ``train()``."""
        self.overlap_resume: str | None = None
        """The checkpoint that ``train()`` resumes from, until it is loaded."""
        super().__init__(*args, **kwargs)
        self.add_callback(OverlapCallback(self))  # type: ignore[attr-defined]

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
        updates = [] if self.overlap_run is None else self.overlap_run.updates
        hidden = (one for one in updates if one.is_sharded or one.releases_gradients)
        if grad_norm is None and not all(update.updates_after_backward for update in hidden):
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
        run = trainer.overlap_run = Attached.for_accelerator(trainer.accelerator).carry_out(
            trainer.overlap_recipe,
            trainer.model_wrapped,
            [trainer.optimizer],
            late=f"max_grad_norm={norm} clips after backward" if norm else "",
            instead=f", or give max_grad_norm=0 and put ClipGradNorm({norm}) into the chain",
        )
        if resume is not None:
            load_files(resume, args.process_index, [run])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        run, trainer.overlap_run = trainer.overlap_run, None
        if run is not None:
            Attached.for_accelerator(trainer.accelerator).detach(run)


class OverlapTrainer(OverlapMixin, Trainer):
    """The Trainer with :class:`OverlapMixin`."""
