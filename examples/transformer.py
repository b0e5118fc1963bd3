"""A small GPT with Muon for its matrices and AdamW for the rest: torchrun --nproc-per-node 2 examples/transformer.py"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import DOCUMENTATION, GPT, Text
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import overlap
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--text", default=DOCUMENTATION, help="a file to learn, byte by byte")
parser.add_argument(
    "--update",
    choices=["sharded", "overlapped", "plain"],
    default="sharded",
    help="sharded: each rank keeps and updates a part, in backward; overlapped: each rank updates all, in backward; "
    "plain: DistributedDataParallel alone. All three learn the same",
)
parser.add_argument("--steps", type=int, default=20, help="training steps")
parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
parser.add_argument("--width", type=int, default=96, help="of the model; a multiple of 32")
parser.add_argument("--layers", type=int, default=3, help="blocks of the model")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
parser.add_argument("--save-every", type=int, default=10, help="steps between two saves")
options = parser.parse_args()


dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
torch.manual_seed(0)
ddp = DistributedDataParallel(
    GPT(options.width, options.layers, options.context), bucket_cap_mb=0.25, gradient_as_bucket_view=True
)

# Muon is for the matrices inside; embeddings, the head and all vectors are AdamW's.
matrices = [p for p in ddp.module.blocks.parameters() if p.ndim == 2]
others = [p for p in ddp.parameters() if all(p is not matrix for matrix in matrices)]
if options.update == "sharded":
    muon = ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.02)
    adamw = ZeroRedundancyOptimizer(others, torch.optim.AdamW, lr=3e-3)
    chain(ZeroStep(muon, release_gradients=True), ZeroStep(adamw, release_gradients=True)).register(ddp)
else:
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)
if options.update == "overlapped":
    muon, adamw = OverlappedOptimizer(muon), OverlappedOptimizer(adamw)
    updates = (Step(one, release_gradients=True) for one in (muon, adamw))
    chain(AllReduce(), *updates).register(ddp)
schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in (muon, adamw)]

text = Text(options.text, batch=options.batch, context=options.context)
first_step = 0
added = {"muon": schedulers[0], "adamw": schedulers[1]}
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    overlap.load(whole[-1].parent, ddp, [muon, adamw], **added)
    first_step = int(whole[-1].parent.name)

for step in range(first_step, options.steps):
    batch = text.at(step)
    for one in (muon, adamw):
        one.zero_grad()  # plain DDP needs it; a registered chain clears gradients by itself
    loss = cross_entropy(ddp(batch[:, :-1]), batch[:, 1:].flatten())
    loss.backward()  # reduces each bucket, updates its parameters, and gives the memory of its gradients back
    for one in (muon, adamw, *schedulers):
        one.step()
    if dist.get_rank() == 0:
        print(f"rank 0: loss {loss.item():.6f} at step {step}", flush=True)
    if options.checkpoint and (step + 1) % options.save_every == 0:
        overlap.save(options.checkpoint / f"{step + 1:06}", ddp, [muon, adamw], **added)
dist.destroy_process_group()
