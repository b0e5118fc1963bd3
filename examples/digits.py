"""ResNet-18 on handwritten digits, with the update in backward: torchrun --nproc-per-node 2 examples/digits.py"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel

import overlap

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=4, help="passes over the 1,500 images of the training split")
parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
parser.add_argument("--width", type=int, default=64, help="channels of the first block; 64 is ResNet-18")
parser.add_argument("--size", type=int, default=8, help="pixels in a row of an image, which has 8: more take longer")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to after each epoch")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def resnet18(width: int) -> nn.Sequential:
    stem = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    widths = [width, 2 * width, 4 * width, 8 * width]
    blocks = [
        Block(inputs, outputs, stride)
        for before, after, first in zip([width, *widths], widths, (1, 2, 2, 2), strict=False)
        for inputs, outputs, stride in ((before, after, first), (after, after, 1))
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
rank, ranks = dist.get_rank(), dist.get_world_size()
pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
images, labels = interpolate(images, size=options.size, mode="bilinear"), torch.tensor(digits)
train, test = torch.arange(1500), torch.arange(1500, len(labels))

torch.manual_seed(0)
ddp = DistributedDataParallel(resnet18(options.width), gradient_as_bucket_view=True)
optim = overlap.OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, fused=True))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.8)
overlap.chain(overlap.AllReduce(), overlap.Step(optim)).register(ddp)

first_epoch = 0
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    overlap.load(whole[-1].parent, ddp, optim, scheduler=scheduler)  # on any number of ranks
    first_epoch = int(whole[-1].parent.name)

for epoch in range(first_epoch, options.epochs):
    ddp.train()
    order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
    for start in range(0, len(order) - ranks * options.batch + 1, ranks * options.batch):
        own = order[start + rank * options.batch :][: options.batch]
        loss = cross_entropy(ddp(images[own]), labels[own])
        loss.backward()  # reduces each bucket of gradients and updates its parameters
        optim.step()
    scheduler.step()
    ddp.eval()
    with torch.no_grad():
        accuracy = (ddp(images[test]).argmax(1) == labels[test]).float().mean().item()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}, accuracy {accuracy:.3f}", flush=True)
    if options.checkpoint:
        overlap.save(options.checkpoint / f"{epoch + 1:04}", ddp, optim, scheduler=scheduler)
dist.destroy_process_group()
