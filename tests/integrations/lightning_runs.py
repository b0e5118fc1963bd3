"""A module, its data and a Lightning trainer, with a chain or without, and the run of each row of the table."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from comparing import model_of_two_buckets, state_of
from forms import optimizer_of, options_of
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader

CLIP = 0.05
BATCHES = 7
SAVED_AFTER = 3


def loader_of(batches: int = BATCHES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    drawn = [
        (torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)) for _ in range(batches)
    ]
    return DataLoader(drawn, batch_size=None)  # type: ignore[arg-type]


def module_of(form: str) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of_two_buckets()
            self.losses: list[torch.Tensor] = []
            self.batches: list[Any] | None = None
            self.lr = 1e-2

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch if self.batches is None else self.batches[index]
            loss = cross_entropy(self.net(x), y)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(form, self.parameters(), lr=self.lr)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    return Module()


def trainer_of(form: str, strategy: Any = None, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    defaults = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    strategy = strategy_of(form) if strategy is None else strategy
    return Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **{**defaults, **options})


def strategy_of(form: str, *, is_resumed: bool = False, **options: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from overlap.integrations.lightning import OverlapStrategy

    if form == "plain":
        return DDPStrategy(bucket_cap_mb=0.005, **options)
    made = {} if form == "wrong" else options_of(form, is_resumed=is_resumed)
    return OverlapStrategy(**made, bucket_cap_mb=0.005, **options)


def left_by(trainer: Any, module: Any) -> dict[str, Any]:
    return {**state_of(module.net, trainer.optimizers[0]), "losses": module.losses}


def play(feature: str, form: str, folder: str) -> Any:
    """The state after the run of a row; see :func:`playing.check_row`."""
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

    def without_update(optimizer: Any) -> Any:
        return optimizer.skip_update() if hasattr(optimizer, "skip_update") else nullcontext()

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


def _fit(form: str, epochs: int, *, resume: str | None = None, by_index: bool = False, **options: Any) -> Any:
    module = module_of(form)
    module.batches = list(loader_of()) if by_index else None
    trainer = trainer_of(form, strategy_of(form, is_resumed=True), max_epochs=epochs, **options)
    trainer.fit(module, loader_of(), ckpt_path=resume)
    return trainer, module


def _resumed_within_an_epoch(form: str, folder: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saved = ModelCheckpoint(f"{folder}/{form}", "saved", every_n_train_steps=BATCHES + SAVED_AFTER, save_top_k=-1)
    whole = left_by(*_fit(form, 2, by_index=True, callbacks=[saved], enable_checkpointing=True))
    whole["losses"] = whole["losses"][BATCHES + SAVED_AFTER :]
    # Lightning begins the loader anew, so a batch is what its index says.
    resumed = left_by(*_fit(form, 2, by_index=True, resume=f"{folder}/{form}/saved.ckpt"))
    return resumed, whole


def _resumed_across(form: str, folder: str, *, is_saved_by_plain: bool) -> Any:
    path = f"{folder}/{form}.ckpt"
    saved_by, loaded_by = ("plain", form) if is_saved_by_plain else (form, "plain")
    _fit(saved_by, 1)[0].save_checkpoint(path)
    return left_by(*_fit(loaded_by, 3, resume=path))


SPECIAL: dict[str, Callable[[str, str], Any]] = {
    "`validate`, `fit`, `test`, `predict`, `fit` of one trainer": _everything,
    "two optimizers, manual: a GAN with `skip_update()`": _gan,
    "a checkpoint within an epoch, resumed": _resumed_within_an_epoch,
    "a checkpoint, resumed in plain Lightning": partial(_resumed_across, is_saved_by_plain=False),
    "a checkpoint of plain Lightning, resumed": partial(_resumed_across, is_saved_by_plain=True),
}
