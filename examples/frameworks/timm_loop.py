"""A loop in the manner of timm's train.py: torchrun --nproc-per-node 2 examples/frameworks/timm_loop.py

Batches are accumulated under no_sync, gradients clipped, a moving average of the weights follows each update, and the
learning rate changes with every update.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from overlap import AllReduce, ClipGradNorm, OverlappedOptimizer, Step, chain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--batches", type=int, default=11, help="of each rank, with a rest that is not a whole update")
parser.add_argument("--accumulate", type=int, default=3, help="batches of an update")
options = parser.parse_args()

dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
model = DistributedDataParallel(net, bucket_cap_mb=0.02)
averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
if not options.plain:
    optimizer = OverlappedOptimizer(optimizer)
    chain(AllReduce(), ClipGradNorm(1.0), Step(optimizer)).register(model)

generator = torch.Generator().manual_seed(dist.get_rank())
for batch in range(options.batches):
    x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
    is_update = (batch + 1) % options.accumulate == 0 or batch + 1 == options.batches
    with contextlib.nullcontext() if is_update else model.no_sync():
        loss = cross_entropy(model(x), y) / options.accumulate
        loss.backward()
    if not is_update:
        continue
    if options.plain:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    averaged.update_parameters(net)
    scheduler.step()

total = sum(parameter.double().abs().sum() for parameter in averaged.parameters())
print(f"rank {dist.get_rank()}: loss {loss.item():.9f}, weights {total.item():.12f}", flush=True)
dist.destroy_process_group()
