"""Lightning with a chain, on two CPU ranks that it starts itself: python examples/frameworks/lightning_module.py"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from overlap import AllReduce, Step, chain
from overlap.integrations.lightning import OverlapStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--output-dir", help="for checkpoints, after every epoch")
parser.add_argument("--resume", metavar="CHECKPOINT", help="a file to go on from")
options = parser.parse_args()


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        self.last = cross_entropy(self.net(x), y)
        return self.last

    def on_train_epoch_end(self) -> None:
        total = sum(parameter.double().abs().sum() for parameter in self.parameters()).item()
        print(f"rank {self.global_rank}: loss {self.last.item():.9f}, weights {total:.12f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
strategy = "ddp"
if not options.plain:
    strategy = OverlapStrategy(chain=lambda optimizer: chain(AllReduce(), Step(optimizer)))
trainer = Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=2,
    max_epochs=options.epochs,
    default_root_dir=options.output_dir,
    enable_checkpointing=options.output_dir is not None,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=8), ckpt_path=options.resume)
