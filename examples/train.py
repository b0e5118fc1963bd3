"""The smallest overlapped training loop: torchrun --nproc-per-node 2 examples/train.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap import AllReduce, OverlappedOptimizer, Step, chain

dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
optim = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True))
chain(AllReduce(), Step(optim)).register(ddp)

for _ in range(10):
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    loss = torch.nn.functional.cross_entropy(ddp(x), y)
    loss.backward()  # reduces each bucket of gradients and updates its parameters
    optim.step()  # all is updated; gradients are cleared before the next forward

print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
dist.destroy_process_group()
