"""A module, its data and a trainer of Lightning, with a chain or without."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from comparing import model_of_two_buckets, state_of
from forms import optimizer_of, options_of
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

__all__ = ["BATCHES", "CLIP", "left_by", "loader_of", "module_of", "strategy_of", "trainer_of"]

CLIP = 0.05
BATCHES = 7


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


def strategy_of(form: str, **options: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from overlap.integrations.lightning import OverlapStrategy

    if form == "plain":
        return DDPStrategy(bucket_cap_mb=0.005, **options)
    made = {} if form == "wrong" else options_of(form)
    return OverlapStrategy(**made, bucket_cap_mb=0.005, **options)


def left_by(trainer: Any, module: Any) -> dict[str, Any]:
    return {**state_of(module.net, trainer.optimizers[0]), "losses": module.losses}
