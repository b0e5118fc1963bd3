"""What is done with a Trainer in each row of Lightning's table, with one form of update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from comparing import model_of_two_buckets, state_of
from forms import optimizer_of, options_of
from lightning_runs import BATCHES, CLIP, left_by, loader_of, module_of, strategy_of, trainer_of

__all__ = ["play"]

SAVED_AFTER = 3


def play(feature: str, form: str, folder: str) -> Any:
    """What the run of a row leaves; see :func:`playing.check_row`."""
    if feature in SPECIAL:
        return SPECIAL[feature](form, folder)
    options: dict[str, Any] = {}
    if feature == "`accumulate_grad_batches=3`":
        options["accumulate_grad_batches"] = 3
    elif feature.startswith("`gradient_clip_val`"):
        options["gradient_clip_val"] = CLIP
        if "value" in feature:
            options["gradient_clip_algorithm"] = "value"
    elif "16-mixed" in feature and "bf16" not in feature:
        options["gradient_clip_val"] = CLIP if "clip" in feature else None
        from lightning.pytorch.plugins import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
        options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    elif "precision" in feature:
        options["precision"] = feature.split('"')[1]
    module, trainer = module_of(form), trainer_of(form, **options)
    trainer.fit(module, loader_of(), loader_of(2))
    return left_by(trainer, module)


def _everything(form: str, folder: str) -> Any:
    module, trainer = module_of(form), trainer_of(form, max_epochs=1)
    path = f"{folder}/{form}-everything.ckpt"
    trainer.validate(module, loader_of(2), verbose=False)
    trainer.fit(module, loader_of(), loader_of(2))
    trainer.test(module, loader_of(2), verbose=False)
    trainer.save_checkpoint(path)
    trainer.predict(module, loader_of(2), ckpt_path=path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader_of(), loader_of(2), ckpt_path=path)
    return left_by(trainer, module)


def _gan(form: str, folder: str) -> Any:
    from lightning.pytorch import LightningModule
    from torch.nn.functional import softplus

    def without_update(optimizer: Any) -> Any:
        return optimizer.skip_update() if hasattr(optimizer, "skip_update") else contextlib.nullcontext()

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = torch.nn.ModuleDict({"generator": model_of_two_buckets(), "critic": torch.nn.Linear(4, 1)})
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> None:
            generator, critic = self.net["generator"], self.net["critic"]
            of_generator, of_critic = self.optimizers()
            loss = softplus(-critic(generator(batch[0]))).mean()
            with without_update(of_critic):
                self.manual_backward(loss)
            of_generator.step()
            of_generator.zero_grad()  # All of training_step is one forward of DDP, so none comes to clear them.
            of_critic.zero_grad()
            self.losses.append(loss.detach().clone())
            loss = softplus(critic(generator(batch[0]).detach())).mean() + softplus(-critic(batch[0][:, :4])).mean()
            with without_update(of_generator):
                self.manual_backward(loss)
            of_critic.step()
            of_critic.zero_grad()
            of_generator.zero_grad()
            self.losses.append(loss.detach().clone())

        def configure_optimizers(self) -> Any:
            return [optimizer_of(form, part.parameters()) for part in self.net.values()]

    module, trainer = Gan(), trainer_of(form, strategy_of(form, find_unused_parameters=True))
    trainer.fit(module, loader_of())
    left, of_critic = left_by(trainer, module), state_of(module.net, trainer.optimizers[1])
    return {key: [value, of_critic[key]] if key == "state" else value for key, value in left.items()}


def _fit(
    form: str,
    epochs: int,
    *,
    resume: str | None = None,
    is_saved_to: str | None = None,
    as_form: Any = None,
    by_index: bool = False,
    **options: Any,
) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from overlap.integrations.lightning import OverlapStrategy

    played = as_form or form
    module = module_of(played)
    module.batches = list(loader_of()) if by_index else None
    chained = options_of(played, is_resumed=True)
    strategy = OverlapStrategy(**chained, bucket_cap_mb=0.005) if chained else DDPStrategy(bucket_cap_mb=0.005)
    trainer = trainer_of(played, strategy, max_epochs=epochs, **options)
    trainer.fit(module, loader_of(), ckpt_path=resume)
    if is_saved_to is not None:
        trainer.save_checkpoint(is_saved_to)
    return trainer, module


def _resumed_within_an_epoch(form: str, folder: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saved = ModelCheckpoint(f"{folder}/{form}", "saved", every_n_train_steps=BATCHES + SAVED_AFTER, save_top_k=-1)
    whole = left_by(*_fit(form, 2, by_index=True, callbacks=[saved], enable_checkpointing=True))
    whole["losses"] = whole["losses"][BATCHES + SAVED_AFTER :]
    # Lightning begins the loader anew, so a batch is what its index says.
    resumed = left_by(*_fit(form, 2, by_index=True, resume=f"{folder}/{form}/saved.ckpt"))
    return resumed, whole


def _resumed_in_plain(form: str, folder: str) -> Any:
    path = f"{folder}/{form}.ckpt"
    _fit(form, 1, is_saved_to=path)
    return left_by(*_fit(form, 3, resume=path, as_form="plain"))


def _resumed_from_plain(form: str, folder: str) -> Any:
    path = f"{folder}/plain-{form}.ckpt"
    _fit("plain", 1, is_saved_to=path)
    return left_by(*_fit(form, 3, resume=path))


SPECIAL: dict[str, Callable[[str, str], Any]] = {
    "`validate`, `fit`, `test`, `predict`, `fit` of one trainer": _everything,
    "two optimizers, manual: a GAN with `skip_update()`": _gan,
    "a checkpoint within an epoch, resumed": _resumed_within_an_epoch,
    "a checkpoint, resumed in plain Lightning": _resumed_in_plain,
    "a checkpoint of plain Lightning, resumed": _resumed_from_plain,
}
