"""A script in the manner of torchvision's references: torchrun --nproc-per-node 2 .../torchvision_reference.py

Epochs of training and evaluation, warm-up and decay by epoch, groups without weight decay, and a checkpoint after every
epoch, from which --resume goes on: here including the state of the chain.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from overlap import AllReduce, OverlappedOptimizer, PowerSGD, Step, chain, load, save

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--powersgd", action="store_true", help="send factors of the gradients")
parser.add_argument("--epochs", type=int, default=3, help="train until this one")
parser.add_argument("--output-dir", type=Path, help="write a checkpoint after every epoch")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output-dir")
options = parser.parse_args()

dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, bias=False),
    nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
model = DistributedDataParallel(net, bucket_cap_mb=0.01)
norms = [p for module in net if isinstance(module, nn.BatchNorm2d) for p in module.parameters()]
others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
groups = [{"params": others, "weight_decay": 1e-2}, {"params": norms, "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[1])
if not options.plain:
    optimizer = OverlappedOptimizer(optimizer)
    chain(PowerSGD(rank=2) if options.powersgd else AllReduce(), Step(optimizer)).register(model)

generator = torch.Generator().manual_seed(1)
images = torch.randn(48, 3, 8, 8, generator=generator)
data = TensorDataset(images, torch.randint(10, (48,), generator=generator))
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=8, sampler=sampler)

first_epoch = 0
if options.resume:
    latest = max(options.output_dir.glob("epoch-*/.metadata")).parent  # The file that is written last.
    load(latest, model, optimizer, scheduler=scheduler)
    first_epoch = int(latest.name.removeprefix("epoch-"))

for epoch in range(first_epoch, options.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.inference_mode():
        accuracy = (model(images).argmax(1) == data.tensors[1]).float().mean()
    print(f"rank {rank}: epoch {epoch}, loss {loss.item():.9f}, accuracy {accuracy.item():.6f}", flush=True)
    if options.output_dir:
        # Of all ranks: compressors remember other things on each.
        save(options.output_dir / f"epoch-{epoch + 1:03}", model, optimizer, scheduler=scheduler)
dist.destroy_process_group()
