"""Epochs in which ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join import Join
from overlap.ranks.collectives import of_all_ranks

__all__ = ["ClosureFirst", "UnevenInputs"]


class ClosureFirst:
    """An optimizer whose ``step(closure)`` is ``closure()`` and then ``step()``, with the forward and the backward
    before it in the order in which ranks without inputs replay them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._optimizer.step(**arguments)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class UnevenInputs:
    """One ``Join`` per epoch, from the first batch to the schedules of this rank's last.

    After that (schedules of epochs, validation, checkpoints) all ranks do the same again. A rank that has run out could
    not take part in collectives of the trainer's own in between, so :meth:`refuse` makes them an error.
    """

    def __init__(self, *, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self._epoch: int | None = None
        self._join: Join | None = None
        self._epoch_loop: Any = None

    def reset(self) -> None:
        """A fit begins."""
        self._epoch = None

    @property
    def is_open(self) -> bool:
        """Whether ranks may have run out of batches."""
        return self._join is not None

    def begin(self, trainer: Trainer, joinables: Sequence[Any], *, is_regular: bool) -> None:
        """A batch begins; at the first of an epoch ranks compare how many they have.

        ``is_regular``: each of the joinables steps in every batch.

        Issues: at that one a gather of a number.

        Raises:
            ConfigurationError: ranks differ, and the trainer is to do what they then could not do together.
        """
        if not self._is_allowed or self._epoch == trainer.current_epoch:
            return
        self._epoch = trainer.current_epoch
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        world = dist.group.WORLD
        assert world is not None, "a model in DistributedDataParallel is trained"
        lengths = of_all_ranks(trainer.num_training_batches - epoch_loop.batch_idx, world)
        if float("inf") in lengths:
            raise ConfigurationError("uneven_inputs=True needs a train_dataloader with a length: give it __len__")
        if len(set(lengths)) == 1:
            return
        _check(trainer, lengths)
        self._join = Join(joinables, lengths=lengths[trainer.global_rank] if is_regular else None)
        self._join.__enter__()
        # Lightning tells all ranks before each batch whether rank 0 was told to end. A rank that has run out of batches
        # would not listen; one that is told to end does so by itself.
        self._epoch_loop = epoch_loop
        epoch_loop._broadcast_sigterm_tensor = lambda: None
        update_schedulers = epoch_loop.update_lr_schedulers

        def update_and_leave(*args: Any, **kwargs: Any) -> None:
            """A batch ends; after this rank's last one of the epoch, wait for the others, and do what they do."""
            update_schedulers(*args, **kwargs)
            if self._join is not None and epoch_loop.batch_progress.is_last_batch:
                self._leave()

        epoch_loop.update_lr_schedulers = update_and_leave

    def fail(self, error: BaseException) -> None:
        """An exception ends the fit: the other ranks learn of it."""
        if self._join is not None:
            self._leave(error)

    def _leave(self, error: BaseException | None = None) -> None:
        join, self._join = self._join, None
        assert join is not None
        del self._epoch_loop._broadcast_sigterm_tensor, self._epoch_loop.update_lr_schedulers
        join.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def refuse(self, what: str) -> None:
        """Raises: TrainingLoopError: ranks may have run out of batches, and ``what`` needs all."""
        if self._join is not None:
            raise TrainingLoopError(
                f"{what} in an epoch in which ranks have different numbers of batches: those that have run out do not "
                "take part, so do it at the end of the epoch (on_step=False, val_check_interval=1.0)"
            )


def _check(trainer: Trainer, lengths: Sequence[int]) -> None:
    found = {
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": trainer.accumulate_grad_batches != 1,
        f"max_steps={trainer.max_steps}": trainer.max_steps != -1,
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "ModelCheckpoint(every_n_train_steps=...)": any(
            getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks
        ),
    }
    for what, is_there in found.items():
        if is_there:
            raise ConfigurationError(
                f"ranks have {lengths} batches in this epoch, and {what} counts batches on each separately, so "
                "ranks would do it at different times: leave it out, or give all ranks as many batches"
            )
