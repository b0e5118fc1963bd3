"""Save and resume with torch.distributed.checkpoint: torchrun --nproc-per-node 2 examples/checkpoint.py

Start it twice with `--checkpoint runs/1`, the second time with more steps: it goes on as if it had never ended, also
with another number of ranks.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import overlap

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20, help="training steps in all, earlier runs' included")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to every five steps")
options = parser.parse_args()

dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(32, 8))
optim = overlap.OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
overlap.chain(overlap.PowerSGD(rank=2), overlap.Step(optim)).register(ddp)

first_step = 0
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    overlap.load(whole[-1].parent, ddp, optim, scheduler=scheduler)  # on any number of ranks
    first_step = int(whole[-1].parent.name)

for step in range(first_step, options.steps):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank()))
    loss = mse_loss(ddp(x), x[:, :8])
    loss.backward()  # compresses, reduces and updates each bucket
    optim.step()
    scheduler.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if options.checkpoint and (step + 1) % 5 == 0:
        # The model, the optimizer, what the stages of each rank remember, and by name what the loop adds.
        overlap.save(options.checkpoint / f"{step + 1:06}", ddp, optim, scheduler=scheduler)
dist.destroy_process_group()
