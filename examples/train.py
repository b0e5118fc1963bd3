"""Plain DDP with one added line: torchrun --nproc-per-node 2 examples/train.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlap

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

# The only new line: gradients are sent in 8 bits.
overlap.chain(overlap.Quantize(overlap.Int8())).register(ddp)

for step in range(100):
    x = torch.randn(32, 64)
    y = x[:, :10].argmax(dim=1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 33 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
