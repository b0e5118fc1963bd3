"""PyTorch-Ignite's trainer with a chain: torchrun --nproc-per-node 2 examples/frameworks/ignite_trainer.py"""

import argparse

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from overlap import AllReduce, OverlappedOptimizer, Step, chain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()


def train(local_rank: int) -> None:
    torch.manual_seed(0)
    model = idist.auto_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not options.plain:
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer)).register(model)

    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(4, (64,), generator=generator))
    loader: DataLoader = idist.auto_dataloader(data, batch_size=16)  # Of all ranks together.
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)

    @trainer.on(Events.EPOCH_COMPLETED)
    def report() -> None:
        total = sum(parameter.double().abs().sum() for parameter in model.parameters()).item()
        print(f"rank {idist.get_rank()}: loss {trainer.state.output:.9f}, weights {total:.12f}", flush=True)

    trainer.run(loader, max_epochs=options.epochs)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)
