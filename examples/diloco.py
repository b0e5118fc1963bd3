"""DiLoCo between sites on a slow link, in 8 bits: torchrun --nproc-per-node 2 examples/diloco.py

Each rank stands for a site that trains alone with AdamW. Every few steps the sites average their parameters' changes,
sent in 8 bits, and an outer optimizer with momentum steps along the mean (Douillard et al., arXiv 2311.08105).
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import overlap
from overlap import Int8, LocalSGD

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=200, help="training steps in all, earlier runs' included")
parser.add_argument("--period", type=int, default=20, help="steps between two averages")
parser.add_argument("--link", type=float, default=100.0, help="Mbit/s, to say what an average would take on it")
parser.add_argument("--overlap", action="store_true", help="average while the next step computes")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to after each period")
options = parser.parse_args()

dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
teacher = nn.Linear(32, 10)  # what all sites are to learn
ddp = DistributedDataParallel(model)
local = LocalSGD(
    ddp,
    torch.optim.AdamW(ddp.parameters(), lr=2e-3),
    period=options.period,
    outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    wire=Int8(),
    overlap=options.overlap,
)

done = 0
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    overlap.load(whole[-1].parent, ddp, local)
    done = int(whole[-1].parent.name)

for step in range(done, options.steps):
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step * ranks + rank))  # each site has its own data
    local.zero_grad()
    loss = cross_entropy(ddp(x), teacher(x).argmax(1))
    loss.backward()
    local.step()  # updates, and averages if it is time
    if (step + 1) % options.period:
        continue
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
    if options.checkpoint:
        overlap.save(options.checkpoint / f"{step + 1:06}", ddp, local)  # the round and a pending average, too

local.synchronize()  # one model for all sites
if rank == 0:
    every_step = sum(p.numel() for p in model.parameters()) * 4 * 2 * (ranks - 1) / ranks
    per_step = every_step / 4 / options.period
    for way, sent in (("plain DDP", every_step), ("DiLoCo, 8 bits", per_step)):
        print(f"{way}: {sent / 1e3:.1f} kB a step, {sent * 8 / options.link / 1e3:.2f} ms at {options.link:g} Mbit/s")
dist.destroy_process_group()
