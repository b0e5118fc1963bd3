"""Accelerate with a chain: torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py, or accelerate launch

Batches are accumulated, gradients clipped in the chain, and the state is saved after every epoch.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from overlap import AllReduce, ClipGradNorm, Step, chain
from overlap.integrations.accelerate import prepare

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--epochs", type=int, default=3, help="train until this one")
parser.add_argument("--output-dir", type=Path, help="save the state after every epoch, one folder for each")
parser.add_argument("--resume", type=int, default=0, metavar="EPOCH", help="go on from the state after this one")
options = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
loader = DataLoader(TensorDataset(torch.randn(72, 16), torch.randint(4, (72,))), batch_size=8)
if options.plain:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
else:
    model, optimizer, loader, scheduler = prepare(
        accelerator,
        model,
        optimizer,
        loader,
        scheduler,
        chain=lambda optimizer: chain(AllReduce(), ClipGradNorm(1.0), Step(optimizer)),
    )
if options.resume:
    accelerator.load_state(options.output_dir / f"epoch-{options.resume}")

for epoch in range(options.resume, options.epochs):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            if options.plain and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    total = sum(parameter.double().abs().sum() for parameter in model.parameters()).item()
    print(f"rank {accelerator.process_index}: loss {loss.item():.9f}, weights {total:.12f}", flush=True)
    if options.output_dir is not None:
        accelerator.save_state(options.output_dir / f"epoch-{epoch + 1}")  # On every rank.
