"""ZeRO and PowerSGD where ranks have different numbers of batches: torchrun --nproc-per-node 2 examples/join.py"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import overlap
from overlap import Join, PowerSGD, ZeroRedundancyOptimizer, ZeroStep, chain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=3, help="passes over the shards, earlier runs' included")
parser.add_argument("--samples", type=int, default=640, help="in rank 0's shard; each later rank has a third less")
parser.add_argument("--rank", type=int, default=4, help="columns of PowerSGD's factors")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to after each epoch")
options = parser.parse_args()

dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
teacher = nn.Linear(32, 10)
torch.manual_seed(1 + rank)
x = torch.randn(int(options.samples * (2 / 3) ** rank), 32)
loader = DataLoader(TensorDataset(x, teacher(x).argmax(1)), batch_size=32)  # shards of different lengths

ddp = DistributedDataParallel(model, bucket_cap_mb=0.2)
zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=2e-3, overlap_with_ddp=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, 0.8)
chain(PowerSGD(rank=options.rank), ZeroStep(zero)).register(ddp)

first_epoch = 0
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    overlap.load(whole[-1].parent, ddp, zero, scheduler=scheduler)
    first_epoch = int(whole[-1].parent.name)

for epoch in range(first_epoch, options.epochs):
    with Join([ddp, zero]) as join:
        for inputs, targets in join.iterate(loader):
            loss = cross_entropy(ddp(inputs), targets)
            loss.backward()  # compresses, reduces, updates this rank's share and gathers
            zero.step()
    scheduler.step()
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    trained = f"rank {rank}, {len(loader)} batches"
    print(f"{trained}, epoch {epoch}: loss {loss.item():.6f}, norm of weights {weights.norm():.6f}", flush=True)
    if options.checkpoint:
        # With what PowerSGD has left out, too.
        overlap.save(options.checkpoint / f"{epoch + 1:04}", ddp, zero, scheduler=scheduler)
dist.destroy_process_group()
